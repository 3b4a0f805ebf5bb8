"""The rows of `deepinfer doctor` on what a server is started with: switches, kernels, settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

from deepinfer_cli.commands.doctor_row import Row
from deepinfer_cli.commands.doctor_serve import Asked, partition_rows, release_of
from deepinfer_cli.detect.gpu import GpuReport
from deepinfer_cli.detect.target import Target
from deepinfer_cli.errors import UsageError
from deepinfer_cli.render import joined
from deepinfer_cli.serve import kernels, line, partition, settings
from deepinfer_cli.validate import switches
from deepinfer_cli.validate.switches import Switches


def switch_rows(target: Target | None) -> Iterator[Row]:
    """The `DEEPINFER_*` variables of this shell."""
    from deepinfer_sm80 import gate

    try:
        found = _switches(target)
    except UsageError as error:
        yield Row("switches", "problem", str(error), error.hint or "")
        return
    said = [f"{gate.DISABLE} is on"] if found.disabled else []
    said += [f"{gate.DISABLE_OPS} leaves {joined(found.ops)} to stock"] if found.ops else []
    said += [f"{gate.FORCE_ARCH} takes {found.forced}'s kernels on any card"] if found.forced else []
    yield Row("switches", "note" if said else "ok", "; ".join(said) or "none set")


def _switches(target: Target | None) -> Switches:
    """As the overlay of `target` would read them, the bundled one where it has none."""
    from deepinfer_cli.overlay import payload

    installed = target.root / payload.PACKAGE if target else None
    there = installed is not None and (installed / "__init__.py").is_file()
    return switches.read(installed if installed and there else payload.bundled().root)


def kernel_rows(target: Target, gpus: GpuReport) -> Iterator[Row]:
    """The attention class and the kernels on each kind of card, and why."""
    from deepinfer_cli.overlay import manifest
    from deepinfer_cli.overlay.inspect import inspect

    known = manifest.load()
    found = inspect(target)
    installed: tuple[str, ...] = ()
    if found.state in ("installed", "unrecorded"):
        ops = found.record.ops if found.record else tuple(op.name for op in known.ops if op.replaces)
        installed = tuple(name for name in ops if name not in found.skip)
    try:
        switched = _switches(target)
    except UsageError:
        # the row of the switches says it
        return
    for arch, served in dict.fromkeys((gpu.arch or "unknown", gpu.served) for gpu in gpus.gpus):
        choice = kernels.choose(
            known, served, installed=installed, disabled=switched.ops, off=switched.disabled
        )
        yield Row(f"attention {arch}", choice.status, choice.attention, choice.hint)
        if served and installed:
            rest = f"; left to stock: {joined(choice.stock)}" if choice.stock else ""
            yield Row(f"kernels {arch}", "ok", f"the overlay's: {joined(choice.ours) or 'none'}{rest}",
                      "experts and linears: stock's Marlin MXFP4 and MXFP8, by vLLM's own choice")  # fmt: skip


def setting_rows(target: Target | None, asked: Asked) -> Iterator[Row]:
    """Settings that go wrong: of this shell, of the line that is asked about, and of running servers.

    Raises:
        UsageError: what was given as a line is none.
    """
    release = release_of(target)
    given = line.parse(asked.serve) if asked.serve is not None else line.Line()
    options, environ = dict(given.options), dict(os.environ) | given.environ
    if asked.tp is not None:
        options["tensor-parallel-size"] = str(asked.tp)
    if asked.pp is not None:
        options["pipeline-parallel-size"] = str(asked.pp)
    if asked.partition is not None:
        environ[partition.VARIABLE] = asked.partition
        if asked.pp is None and "pipeline-parallel-size" not in options:
            options["pipeline-parallel-size"] = str(asked.partition.count(",") + 1)
    found = settings.check(settings.Settings(environ, options, release))
    if partition.VARIABLE in environ and "pipeline-parallel-size" not in options:
        found += settings.partition_findings(environ[partition.VARIABLE], None, release)
    for name in given.unread:
        yield Row(
            f"settings: {name}",
            "note",
            "its value comes from the shell, and was not looked at",
            "give the value itself",
        )
    yield from _findings(found, "settings")
    yield from partition_rows(environ.get(partition.VARIABLE), found)
    yield from _running(target, release)


def _findings(found: list[settings.Finding], name: str) -> Iterator[Row]:
    for one in found:
        yield Row(f"{name}: {one.name}", one.severity, f"{one.text} ({one.source})", one.hint)
    if not found:
        yield Row(name, "ok", "none that is known to go wrong")


def _running(target: Target | None, release: str) -> Iterator[Row]:
    from deepinfer_cli.detect.process import running

    for process in running(target.root) if target else ():
        words = process.command.split()
        start = line.start_of(words)
        if start is not None:
            options = line.parse_options(words[start:])
            found = settings.check(settings.Settings({}, options, release))
            yield from _findings(found, f"process {process.pid}")
