"""A stand-in for vLLM's engine: enough for the child to run, log-probabilities made of hashes."""

from __future__ import annotations

from pathlib import Path

INIT = '''
import hashlib, json, os, types
import torch

__version__ = "0.0.fake"
torch.cuda.get_device_name = lambda *a: "fake GPU"
torch.cuda.get_device_capability = lambda *a: (9, 0)
for name in ("memory_allocated", "max_memory_allocated"):
    setattr(torch.cuda, name, lambda *a: 7)
torch.cuda.reset_peak_memory_stats = torch.cuda.synchronize = lambda *a: None
FAULT = os.environ.get("FAKE_FAULT", "")


class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update({"logprobs": None, "prompt_logprobs": None, **given})


class Logprob:
    def __init__(self, logprob):
        self.logprob = logprob


def draw(*what):
    digest = hashlib.sha256(repr(what).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


class Attention(torch.nn.Module):
    pass


class LLM:
    def __init__(self, model, load_format, **settings):
        from vllm.model_executor import model_loader
        config = json.loads(open(model + "/config.json").read())
        assert config["model_type"] == "deepseek_v41"
        if FAULT == "start":
            try:
                raise ValueError("type fp8e4nv not supported in this architecture")
            except ValueError as error:
                raise RuntimeError("engine core failed") from error
        module = torch.nn.Module()
        module.attn = Attention()
        module.weight = torch.nn.Parameter(torch.empty(4, 8), requires_grad=False)
        loader = model_loader.LOADERS[load_format]()
        loader.load_weights(module, types.SimpleNamespace(architectures=config["architectures"]))
        self.weight = module.weight
        runner = types.SimpleNamespace(get_model=lambda: module)
        self.worker = types.SimpleNamespace(worker=types.SimpleNamespace(model_runner=runner))
        cache = types.SimpleNamespace(num_gpu_blocks=11)
        self.scheduler = types.SimpleNamespace(
            max_num_scheduled_tokens=settings["max_num_batched_tokens"],
            kv_cache_config=types.SimpleNamespace(num_blocks=12),
        )
        core = types.SimpleNamespace(
            scheduler=self.scheduler, vllm_config=types.SimpleNamespace(cache_config=cache)
        )
        self.llm_engine = types.SimpleNamespace(
            engine_core=types.SimpleNamespace(engine_core=core),
            model_config=types.SimpleNamespace(max_model_len=settings["max_model_len"]),
        )
        print("GPU KV cache size: 12,345 tokens")

    def collective_rpc(self, function):
        return [function(self.worker)]

    def place(self, context, decoding):
        """Likely tokens after a context: they follow from the model and the context alone."""
        weight = float(self.weight.sum())
        found = {}
        for index in range(5):
            token = 10 + int(draw("token", weight, context[-3:], index) * 1000)
            found[token] = Logprob(-1.0 - index - draw("value", weight, context[-3:], index))
        if decoding and FAULT == "decode":
            found = {token: Logprob(one.logprob - 0.5) for token, one in found.items()}
        return found

    def generate(self, prompts, parameters, use_tqdm):
        assert not use_tqdm and self.scheduler.max_num_scheduled_tokens > 0
        if FAULT == "phase" and parameters.max_tokens == 16:
            raise RuntimeError("a kernel failed")
        return [self.one(prompt["prompt_token_ids"], parameters) for prompt in prompts]

    def one(self, prompt, parameters):
        def entry(context, token, decoding):
            place = self.place(context, decoding)
            low = -2.0 - draw("other", context[-3:], token) - (0.5 if decoding and FAULT == "decode" else 0.0)
            if FAULT == "chunk" and self.scheduler.max_num_scheduled_tokens == 700:
                low -= 0.2
            place.setdefault(token, Logprob(low))
            return place

        tokens, logprobs = [], []
        for _ in range(parameters.max_tokens):
            context = list(prompt) + tokens
            token = next(iter(self.place(context, True)))
            logprobs.append(entry(context, token, True))
            tokens.append(token)
        scored = None
        if parameters.prompt_logprobs is not None:
            scored = [None, *(entry(prompt[:index], prompt[index], False) for index in range(1, len(prompt)))]
        return types.SimpleNamespace(
            prompt_token_ids=prompt, prompt_logprobs=scored,
            num_cached_tokens=0 if FAULT == "cache" else 128,
            outputs=[types.SimpleNamespace(token_ids=tokens, logprobs=logprobs)],
        )
'''
CUDA = """
class NvmlCudaPlatform:
    pass


class NonNvmlCudaPlatform:
    pass
"""
INTERFACE = """
from collections import namedtuple

DeviceCapability = namedtuple("DeviceCapability", "major minor")
"""
LOADER = """
LOADERS = {}


def register_model_loader(name):
    def keep(cls):
        LOADERS[name] = cls
        return cls

    return keep
"""


def make(folder: Path) -> Path:
    """Writes the site; returns the folder that holds `vllm`."""
    files = {
        "__init__.py": INIT,
        "platforms/__init__.py": "",
        "platforms/cuda.py": CUDA,
        "platforms/interface.py": INTERFACE,
        "distributed.py": "def get_tensor_model_parallel_rank():\n    return 0\n",
        "model_executor/__init__.py": "",
        "model_executor/model_loader/__init__.py": LOADER,
        "model_executor/model_loader/dummy_loader.py": "class DummyModelLoader:\n    pass\n",
    }
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
