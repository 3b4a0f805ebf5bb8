"""The command line of `deepinfer bench`; what it does is imported when it runs."""

from __future__ import annotations

from deepinfer_cli.commands import options as o
from deepinfer_cli.commands import serving_options as s

EXAMPLES = o.examples(
    "deepinfer bench",
    "deepinfer bench gather --output rows.json --baseline old.json",
    "deepinfer bench --serving --model MODEL --output serving.json -- --tensor-parallel-size 8",
    "deepinfer bench --serving --endpoint http://a:8000 --endpoint http://b:8000",
)


def bench(
    ops: o.OpsArgument = None,
    target: o.Target = None,
    python: o.Python = None,
    op: o.Ops = "",
    arch: o.VerifyArch = None,
    max_smem: o.MaxSmem = None,
    torch_from: o.TorchFrom = None,
    provider: o.Provider = None,
    output: o.RowsFile = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = None,
    timeout: o.Timeout = None,
    serving: s.Serving = False,
    model: s.Model = None,
    small: s.Small = False,
    endpoint: s.Endpoint = None,
    together: s.Together = False,
    rounds: s.Rounds = 1,
    runs: s.Runs = None,
    input_tokens: s.InputTokens = None,
    streams: s.Streams = None,
    output_tokens: s.OutputTokens = None,
    prompts: s.Prompts = None,
    text: s.ScoredText = None,
    port: s.Port = None,
    seed: s.Seed = None,
    start_timeout: s.StartTimeout = None,
    logs: s.Logs = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = 0,
    no_color: o.NoColor = False,
    debug: o.Debug = False,
) -> int:
    """Measure the overlay against stock vLLM and PyTorch.

    All in one run on this machine's GPU; a case that is not correct is not timed.
    With --serving, two servers under vLLM's own benchmark: all ops on, and the accelerate ops off.
    """
    served = s.given(
        model, small, endpoint, together, rounds, runs, input_tokens, streams, output_tokens, prompts, text, port, seed,
        start_timeout, logs,
    )  # fmt: skip
    if serving:
        s.refuse({"--ops": op, "--max-smem": max_smem, "--torch-from": torch_from, "--provider": provider,
                  "--baseline": baseline, "--threshold": threshold}, "does not go with --serving")  # fmt: skip
        from deepinfer_cli.commands import bench_serving
        from deepinfer_cli.commands.serving_request import ServingOptions

        where = o.TargetOptions(target, python)
        asked = ServingOptions(
            where, tuple(ops or ()), arch=arch, output=output, **served, **s.run_timeout(timeout)
        )
        return o.run(bench_serving.run, asked, json, quiet, verbose, no_color)
    s.refuse(served, "goes with --serving")
    from deepinfer_cli.commands import bench as command

    options = command.BenchOptions(
        where=o.TargetOptions(target, python),
        ops=o.names(ops, op),
        arch=arch,
        max_smem=max_smem,
        torch_from=torch_from,
        providers=tuple(provider or ()),
        output=output,
        baseline=baseline,
        threshold=threshold,
        **({} if timeout is None else {"timeout_s": timeout}),
    )
    return o.run(command.run, options, json, quiet, verbose, no_color)
