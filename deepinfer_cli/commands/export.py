"""`deepinfer export`: the overlay as a patch, as files to copy, or as mounts for containers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from deepinfer_cli import outfile
from deepinfer_cli.commands import common
from deepinfer_cli.commands.options import CONTAINER_ROOT, TargetOptions
from deepinfer_cli.errors import RefusedError, UsageError
from deepinfer_cli.output import Output
from deepinfer_cli.overlay.plan import Plan
from deepinfer_cli.render import plural
from deepinfer_cli.result import Result

IMAGE = "vllm/vllm-openai"
_PAYLOAD = "vllm/deepinfer_sm80"
COMPOSE_FILE = "compose.deepinfer.yaml"
FLAGS_FILE = "docker-run.flags"
# what docker compose takes
_SERVICE = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What `export` was asked to write.

    Attributes:
        form: `patch`, `tree` or `docker`.
        output: a patch's file; None writes it to stdout.
        into: folder for a tree or for mounts.
        container_root: where vLLM is inside the image.
        service: name of the compose service that runs vLLM.
    """

    form: str
    where: TargetOptions = field(default_factory=TargetOptions)
    output: Path | None = None
    into: Path | None = None
    container_root: str = CONTAINER_ROOT
    service: str = "vllm"
    partial: bool = False
    force: bool = False


def run(opts: ExportOptions, out: Output) -> Result:
    """Writes the export; the target itself is only read."""
    _check_folder(opts)
    if not PurePosixPath(opts.container_root).is_absolute():
        raise UsageError(f"--container-root {opts.container_root} is not an absolute path", code="usage")
    if not _SERVICE.fullmatch(opts.service):
        raise UsageError(
            f"--service {opts.service!r} is not the name of a compose service",
            code="usage",
            hint="letters, digits, dots, dashes and underscores",
        )
    if opts.form == "docker" and opts.into is not None:
        _check_mounts(str(opts.into.absolute()), opts.container_root)
    target = common.locate(opts.where, out)
    common.refuse_pending(target, opts.where)
    plan = _plan(opts, target)
    for text in plan.notes:
        out.warn(text)
    data: dict[str, Any] = {
        "form": opts.form,
        "target": common.target_data(target),
        "match": plan.match,
        "release": plan.release,
        "overlay_version": plan.overlay_version,
        "skip": list(plan.skip),
    }
    if opts.form == "patch":
        return Result("export", data | _patch(opts, plan, out))
    assert opts.into is not None
    written = _tree(plan, opts.into) if opts.form == "tree" else _docker(opts, plan, opts.into, out)
    if opts.form == "tree":
        out.line(f"wrote {plural(len(written), 'file')} below {opts.into}")
        # plain cp would write through a hard link, into uv's cache and every environment made from it
        command = ["cp", "-r", "--remove-destination", f"{opts.into.absolute()}/vllm/.", f"{target.root}/"]
        out.line(f"apply with: {shlex.join(command)}")
    return Result("export", data | {"into": str(opts.into.absolute()), "files": written})


def _check_mounts(*paths: str) -> None:
    """`--mount` is CSV and compose files expand `$`: neither has one spelling that every docker reads."""
    odd = next((path for path in paths if set(path) & set(',"$\n\r')), None)
    if odd is not None:
        raise UsageError(
            f"docker cannot mount {odd!r}",
            code="usage",
            hint='name a path without commas, quotes (") and $',
        )


def _check_folder(opts: ExportOptions) -> None:
    if opts.form == "patch":
        if opts.output is None:
            return
        outfile.check(opts.output)
        if opts.output.is_file() and not opts.force:
            raise RefusedError(
                "the file exists",
                code="output-exists",
                hint="name a new file, or pass --force to write over it",
                paths=(opts.output,),
            )
        return
    if opts.into is None:
        raise UsageError(f"export {opts.form} needs --into DIR", code="usage")
    if (opts.into / "vllm" / "__init__.py").exists():
        # not even with --force: an export has no journal and no backups
        raise RefusedError(
            "the folder holds a vLLM",
            code="output-exists",
            hint=f"name a new folder; `deepinfer install --target {shlex.quote(str(opts.into))}` is what writes into a vLLM",
            paths=(opts.into,),
        )
    if opts.into.exists() and not opts.into.is_dir():
        raise UsageError(f"--into {opts.into} is a file", code="usage", hint="name a new or empty folder")
    if opts.into.is_dir() and any(opts.into.iterdir()) and not opts.force:
        raise RefusedError(
            "the folder is not empty",
            code="output-exists",
            hint="name a new folder, or pass --force to write into this one",
            paths=(opts.into,),
        )


def _plan(opts: ExportOptions, target: Any) -> Plan:
    from deepinfer_cli.overlay import manifest, payload
    from deepinfer_cli.overlay.plan import plan_install
    from deepinfer_cli.overlay.record import read_record

    bundled = payload.bundled()
    known = manifest.load(bundled.root / "manifest.toml")
    try:
        return plan_install(
            target, bundled, known, record=read_record(target.state_dir), partial=opts.partial
        )
    except RefusedError as error:
        error.hint = (
            "an export is made from vLLM's own files, with or without our block: put those back first"
        )
        raise


def _patch(opts: ExportOptions, plan: Plan, out: Output) -> dict[str, Any]:
    from deepinfer_cli.overlay.patchfile import git_apply, unified_patch

    content = unified_patch(plan)
    where, checkout = plan.target.parent, plan.target.git_dir is not None
    if opts.output is None:
        out.raw(content)
        out.note(f"apply with: {git_apply(where, 'FILE', checkout=checkout)}")
        return {"output": None, "patch": content.decode("utf-8", "surrogateescape")}
    outfile.write(opts.output, content)
    out.line(f"wrote {opts.output}")
    out.line(f"apply with: {git_apply(where, str(opts.output.absolute()), checkout=checkout)}")
    return {"output": str(opts.output.absolute()), "patch": None}


def _tree(plan: Plan, into: Path, more: dict[str, str] | None = None) -> list[str]:
    """Write the plan's files, and `more`, into `into`: on a full disk nothing of them is left there."""
    from deepinfer_cli.overlay.patchfile import write_tree

    made = next(
        (folder for folder in (*reversed(into.absolute().parents), into) if not folder.exists()), None
    )
    staging = None
    try:
        into.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=into, prefix=".deepinfer-export-"))
        files = [path.relative_to(staging) for path in write_tree(plan, staging)]
        for name, text in (more or {}).items():
            (staging / name).write_text(text, encoding="utf-8")
        # with --force an export takes the place of an earlier one
        shutil.rmtree(into / _PAYLOAD, ignore_errors=True)
        for change in plan.changes:
            (into / change.path).unlink(missing_ok=True)
        for path in (*files, *map(Path, more or ())):
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            (staging / path).replace(into / path)
        shutil.rmtree(staging)
    except BaseException as error:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise outfile.failed(error, into) from error
        raise
    return sorted(path.as_posix() for path in files)


def _docker(opts: ExportOptions, plan: Plan, into: Path, out: Output) -> list[str]:
    from deepinfer_cli.overlay.patchfile import exported

    files = sorted(path for path, _ in exported(plan))
    mounts = mount_points(files, into.absolute(), opts.container_root)
    version = (plan.target.version or plan.release).partition("+")[0]
    compose = compose_text(mounts, opts.service, f"{IMAGE}:v{version}")
    options = (f"type=bind,source={source},target={destination},readonly" for source, destination in mounts)
    flags = "".join(f"--mount {shlex.quote(option)}\n" for option in options)
    _tree(plan, into, {COMPOSE_FILE: compose, FLAGS_FILE: flags})
    out.line(f"wrote {plural(len(files), 'file')} and {COMPOSE_FILE}, {FLAGS_FILE} to {into}")
    compose_file = shlex.quote(str(into.absolute() / COMPOSE_FILE))
    out.line(f"docker compose -f your-compose.yaml -f {compose_file} up")
    out.line("or add to docker run:")
    for line in flags.splitlines():
        out.line(f"  {line}")
    return [*files, COMPOSE_FILE, FLAGS_FILE]


def mount_points(files: list[str], folder: Path, container_root: str) -> list[tuple[str, str]]:
    """(host path, container path) of each edited file, and of the payload's folder, which is ours alone."""
    root = container_root.rstrip("/")
    hooked = [path for path in files if not path.startswith(f"{_PAYLOAD}/")]
    paths = [*hooked, _PAYLOAD]
    return [(str(folder / path), f"{root}/{path.removeprefix('vllm/')}") for path in paths]


def compose_text(mounts: list[tuple[str, str]], service: str, image: str) -> str:
    """A compose override that adds the mounts, read-only, to `service`."""
    lines = [
        "# added to a compose file that defines this service:",
        "#   docker compose -f your-compose.yaml -f " + COMPOSE_FILE + " up",
        f"# made for the files of {image}; mounts are per file, so vLLM's shared libraries stay visible",
        "services:",
        f"  {json.dumps(service)}:",
        "    volumes:",
    ]
    for source, destination in mounts:
        lines += [
            "      - type: bind",
            f"        source: {json.dumps(source)}",
            f"        target: {json.dumps(destination)}",
            "        read_only: true",
            "        bind:",
            "          create_host_path: false",
        ]
    return "\n".join(lines) + "\n"
