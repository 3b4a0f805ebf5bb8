"""A stand-in for vLLM's two commands: a server that answers from hashes, with processes of its own, and a client.

`FAKE_SERVER` in the environment makes it misbehave: `fail`, `hang`, `other-name`, `deaf` (ignores SIGTERM), `die:N`
(goes away at the N-th completion), `silent` (the overlay says nothing), `bad:N` (refuses the N-th completion).
`FAKE_CLIENT`: `kill:N` (the client is killed in its N-th run), `hang:N`, `import`.
"""

from __future__ import annotations

from pathlib import Path

MAIN = r"""
import hashlib, json, os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULT = os.environ.get("FAKE_SERVER", "")
# an engine that has left the session, ignores SIGTERM and waits for ever, as one stuck in the driver would
ENGINE = "import signal,time,os,sys; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
OPS = ["attention", "combine", "engram", "gather", "ragged", "sparse_decode"]


def log(pid, text):
    sys.stderr.write(f"(EngineCore_DP0 pid={pid}) INFO 11-30 06:59:38 [x.py:1] {text}\n")
    sys.stderr.flush()


def value(arguments, name):
    return arguments[arguments.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize = "HTTP/1.1", 65_536
    seen, cached, count = set(), 0, 0

    def log_message(self, *words):
        pass

    def answer(self, content, code=200):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            self.answer({})
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": NAME, "root": NAME}]})
        elif self.path == "/metrics":
            self.answer(
                b'# HELP x\nvllm:prefix_cache_hits_total{engine="0"} %d.0\nvllm:prefix_cache_hits_total{engine="1"} 0.0\n'
                % Handler.cached
            )
        else:
            self.answer({"error": {"message": "no such page"}}, 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"tokens": [len(word) for word in body["prompt"].split()]})
            return
        prompt = body["prompt"]
        if "prompt_logprobs" in body:
            # what a kernel's rounding would do, and another order of a sum from run to run
            Handler.count += 1
            off = 1e-3 if "combine" in SWITCHED_OFF else 0.0
            rows = [None] + [
                {str(token): {"logprob": -(1.0 + token % 7 + off + 1e-6 * Handler.count), "rank": 1}}
                for token in prompt[1:]
            ]
            self.answer({"choices": [{"prompt_logprobs": rows, "text": ""}]})
            return
        Handler.count += 1
        kind, _, number = FAULT.partition(":")
        if kind == "die" and Handler.count == int(number):
            os._exit(7)
        if kind == "bad" and Handler.count == int(number):
            self.answer({"error": {"message": "this model has too many tokens"}}, 400)
            return
        if prompt in Handler.seen:
            Handler.cached += 64
        Handler.seen.add(prompt)
        time.sleep(0.03 if "combine" in SWITCHED_OFF else 0.01)
        self.answer({"usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}})


def look(answers):
    from vllm.model_executor import model_loader
    from vllm.platforms import cuda

    seen = cuda.NvmlCudaPlatform.get_device_capability()
    answers.put([sorted(model_loader.LOADERS), [seen.major, seen.minor]])


def prepared():
    # what this process and one that it spawns have of the small model's loader, and which card they see
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    look(answers)
    process = context.Process(target=look, args=(answers,))
    process.start()
    process.join()
    return [answers.get(), answers.get() if process.exitcode == 0 else "spawned process failed"]


def main():
    global NAME, SWITCHED_OFF
    arguments = sys.argv[1:]
    assert arguments[0] == "serve", arguments
    assert sys.stdin.read() == ""
    if os.path.isdir(arguments[1]):
        assert json.load(open(arguments[1] + "/config.json"))["model_type"] == "deepseek_v41"
    if "deepinfer_small" in arguments:
        sys.stderr.write(f"prepared: {json.dumps(prepared())}\n")
    NAME = value(arguments, "--served-model-name")
    if FAULT == "other-name":
        NAME = "somebody-elses"
    SWITCHED_OFF = [op for op in os.environ.get("DEEPINFER_DISABLE_OPS", "").split(",") if op]
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE)
    pid = int(engine.stdout.readline())
    open(os.environ["FAKE_PIDS"], "a").write(f"{os.getpid()}\n{pid}\n")
    log(pid, "Initializing a V1 LLM engine")
    if FAULT == "fail":
        raise ValueError("Free memory on device is less than desired GPU memory utilization")
    if FAULT == "hang":
        time.sleep(600)
    if FAULT == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if FAULT != "silent":
        bound = [op for op in OPS if op not in SWITCHED_OFF]
        off = f"; switched off: {', '.join(sorted(SWITCHED_OFF))}" if SWITCHED_OFF else ""
        forced = " (forced)" if os.environ.get("DEEPINFER_FORCE_ARCH") else ""
        for some in (bound[:2], bound):
            log(pid, f"DeepInfer 0.1.0: sm80{forced}; bound {', '.join(some)}{off} (vllm.models.x)")
    log(pid, "GPU KV cache size: 123,456 tokens")
    ThreadingHTTPServer(("127.0.0.1", int(value(arguments, "--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
"""

BENCH = r"""
import json, os, random, signal, time, urllib.request
from concurrent.futures import ThreadPoolExecutor

FAULT = os.environ.get("FAKE_CLIENT", "")
open(os.environ["FAKE_PIDS"] + "-client", "a").write(f"{os.getpid()}\n")
if FAULT == "import":
    raise ImportError("No module named 'aiohttp'")
RUNS = 0


def get_tokenizer(name):
    return name


def add_cli_args(parser):
    for name in ("backend", "base-url", "endpoint", "model", "served-model-name", "tokenizer", "dataset-name", "dataset-path",
                 "result-dir", "result-filename"):
        parser.add_argument(f"--{name}")
    for name in ("random-input-len", "random-output-len", "sharegpt-output-len", "custom-output-len", "num-prompts",
                 "max-concurrency", "seed", "ready-check-timeout-sec", "num-warmups"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--temperature", type=float)
    for name in ("ignore-eos", "disable-tqdm", "save-result", "save-detailed", "skip-chat-template"):
        parser.add_argument(f"--{name}", action="store_true")


def main(args):
    global RUNS
    RUNS += 1
    get_tokenizer(args.model)
    kind, _, number = FAULT.partition(":")
    once = os.environ.get("FAKE_ONCE", "")
    if kind in ("kill", "hang") and RUNS == int(number) and not (once and os.path.exists(once)):
        if once:
            open(once, "w").close()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    draw = random.Random(args.seed)
    if args.dataset_name == "random":
        output = args.random_output_len
        prompts = [" ".join(f"w{draw.randrange(10**6)}" for _ in range(args.random_input_len))
                   for _ in range(args.num_prompts)]
    elif args.dataset_name == "sharegpt":
        output = args.sharegpt_output_len
        prompts = [one["conversations"][0]["value"] for one in json.load(open(args.dataset_path))]
        draw.shuffle(prompts)
    else:
        output = args.custom_output_len
        prompts = [json.loads(line)["prompt"] for line in open(args.dataset_path)]
    prompts = prompts[: args.num_prompts]
    model = args.served_model_name or args.model or "first"

    def one(prompt):
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": output}).encode()
        began = time.perf_counter()
        try:
            request = urllib.request.Request(args.base_url + args.endpoint, body)
            with urllib.request.urlopen(request, timeout=20) as answer:
                usage = json.load(answer)["usage"]
        except OSError as error:
            return 0.0, [], 0, 0, str(error)
        span = time.perf_counter() - began
        return span, [span] * (output - 1), usage["prompt_tokens"], output, ""

    with ThreadPoolExecutor(args.max_concurrency) as pool:
        found = list(pool.map(one, prompts))
    failed = sum(bool(row[4]) for row in found)
    result = {
        "completed": len(found) - failed, "failed": failed, "duration": 1.0, "output_throughput": 10.0,
        "ttfts": [row[0] for row in found], "itls": [row[1] for row in found],
        "input_lens": [row[2] for row in found], "output_lens": [row[3] for row in found],
        "errors": [row[4] for row in found],
    }
    if output > 1:
        result |= {"spec_decode_acceptance_rate": 40.0, "spec_decode_acceptance_length": 3.0}
    with open(os.path.join(args.result_dir, args.result_filename), "w") as stream:
        json.dump(result, stream)
"""

LOADER = """
LOADERS = {}


def register_model_loader(name):
    return lambda kind: LOADERS.setdefault(name, kind)
"""
CUDA = """
from vllm.platforms.interface import DeviceCapability


class NvmlCudaPlatform:
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(major=9, minor=0))


class NonNvmlCudaPlatform(NvmlCudaPlatform):
    pass
"""
FILES = {
    # what prepares a process imports these; the real ones take seconds
    "torch/__init__.py": "",
    "triton/__init__.py": "",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": LOADER,
    "vllm/model_executor/model_loader/dummy_loader.py": "class DummyModelLoader:\n    pass\n",
    "vllm/platforms/__init__.py": "",
    "vllm/platforms/cuda.py": CUDA,
    "vllm/platforms/interface.py": "from collections import namedtuple\n\n"
    "DeviceCapability = namedtuple('DeviceCapability', 'major minor')\n",
    "vllm/__init__.py": '__version__ = "0.0.fake"\n',
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/main.py": MAIN,
    "vllm/benchmarks/__init__.py": "",
    "vllm/benchmarks/serve.py": BENCH,
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
}


def make(folder: Path) -> Path:
    """Writes the stand-in to `folder` and returns it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
