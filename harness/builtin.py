"""The engines and launchers that come with the harness: where each lives, and what it needs."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.api import HarnessError
from harness.common.packages import install_extra
from harness.common.plugins import Plugin


@dataclass(frozen=True)
class Entry:
    """Where something lives (`module:Class`), the importable modules it needs, and the extra that installs them."""

    target: str
    requires: tuple[str, ...] = ()
    extra: str = ""

    def missing(self) -> list[str]:
        """Required modules that this interpreter does not have."""
        return [m for m in self.requires if importlib.util.find_spec(m) is None]

    @property
    def remedy(self) -> str:
        """What installs the missing modules."""
        if self.extra:
            return install_extra(self.extra)
        return "use --launcher venv or docker"

    def require(self, who: str) -> None:
        """Raises HarnessError saying that `who` needs modules that are missing."""
        if missing := self.missing():
            raise HarnessError(f"{who} needs {', '.join(missing)}: {self.remedy}")


@dataclass(frozen=True)
class EngineEntry(Entry):
    """An engine's entry."""

    summary: str = ""
    builtin_model: str = ""  # "module:NAME" of a LocalModel for engines that read no checkpoint
    builtin_text: str = ""  # "module:NAME" of the tokenizer of the built-in model
    longest: str = ""  # "module:function" that plans its longest sequence without loading it
    refuses: str = ""  # "module:function" that refuses cells it cannot run, without its packages
    refuses_model: str = ""  # "module:function" that refuses a model by the folder of its configuration, and its shape
    predicted: bool = False  # whether there is a performance model of it on a machine without a device
    environment: str = ""  # name of its list of pins and of its image, for an environment of its own
    needs: str = ""  # what it needs beside packages, in words
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables that its process should have
    plugin: Plugin | None = None  # where it comes from, for an engine of another distribution


#: `registry.engines` adds those of plug-ins.
ENGINES: Mapping[str, EngineEntry] = {
    "fake": EngineEntry(
        "engines.adapters.fake:FakeEngine",
        summary="deterministic tokens in virtual time; drives the harness's tests",
        builtin_model="engines.adapters.fake:MODEL",
        builtin_text="engines.adapters.fake:FakeText",
        longest="engines.adapters.fake:longest_sequence",
        refuses="engines.adapters.fake:refuse",
        environment="harness",
    ),
    "transformers": EngineEntry(
        "engines.adapters.transformers:TransformersEngine",
        ("torch", "transformers", "safetensors"),
        "transformers",
        summary="Hugging Face transformers: weights resident; KV cache resident, offloaded or quantized",
        environment="accelerate",
    ),
    "transformers_batch": EngineEntry(
        "engines.adapters.transformers_batch:TransformersBatchEngine",
        ("torch", "transformers", "safetensors"),
        "transformers",
        summary="transformers' own continuous batching (generate_batch): weights resident, greedy only",
        environment="accelerate",
    ),
    "accelerate": EngineEntry(
        "engines.adapters.accelerate:AccelerateEngine",
        ("torch", "transformers", "safetensors", "accelerate"),
        "accelerate",
        summary="Hugging Face Accelerate: weights on a device, in RAM and on disk",
        environment="accelerate",
    ),
    "deepspeed_zero": EngineEntry(
        "engines.adapters.deepspeed_zero:DeepSpeedZeroEngine",
        ("torch", "transformers", "safetensors", "deepspeed"),
        summary="DeepSpeed ZeRO-Inference: ZeRO stage 3 with parameters in RAM or on disk",
        refuses="engines.adapters.refusals:deepspeed_zero",
        environment="deepspeed",
        needs="libaio and a C++ compiler for parameters on disk",
    ),
    "flexgen_ref": EngineEntry(
        "engines.adapters.flexgen_ref:FlexGenEngine",
        ("torch", "transformers", "flexgen"),
        summary="FlexGen's own code (OPT only); without CUDA through a shim of ours",
        refuses="engines.adapters.refusals:flexgen_ref",
        environment="flexgen",
    ),
    "llama_cpp": EngineEntry(
        "engines.adapters.llama_cpp:LlamaCppEngine",
        ("xllamacpp", "gguf"),
        summary="llama.cpp's server, built for this CPU, with parallel sequences (LLaMA only); maps its weights",
        refuses="engines.adapters.refusals:llama_cpp",
        environment="llamacpp",
        needs="a C++ compiler when its environment is built; else a prebuilt one runs, for AVX2 only",
    ),
    "airllm": EngineEntry(
        "engines.adapters.airllm:AirLlmEngine",
        ("torch", "transformers", "airllm"),
        summary="AirLLM: one layer in memory at a time (LLaMA and its like)",
        refuses="engines.adapters.refusals:airllm",
        environment="airllm",
    ),
    "ollm": EngineEntry(
        "engines.adapters.ollm:OllmEngine",
        ("torch", "transformers", "ollm"),
        summary="oLLM: layers read from disk as they run, some held in RAM; one sequence at a time (LLaMA, bfloat16)",
        refuses="engines.adapters.refusals:ollm",
        environment="ollm",
    ),
    "vllm": EngineEntry(
        "engines.adapters.vllm:VllmEngine",
        ("torch", "vllm"),
        summary="vLLM with weights and KV cache offloaded to RAM",
        refuses="engines.adapters.refusals:vllm",
        environment="vllm",
        needs="a CUDA device",
    ),
    "vllm_cpu": EngineEntry(
        "engines.adapters.vllm_cpu:VllmCpuEngine",
        ("torch", "vllm"),
        summary="vLLM's build for CPUs: weights and KV cache resident",
        refuses="engines.adapters.refusals:vllm_cpu",
        environment="vllm_cpu",
    ),
    "openvino": EngineEntry(
        "engines.adapters.openvino:OpenVinoEngine",
        ("openvino", "openvino_genai", "optimum"),
        summary="OpenVINO GenAI on a CPU: weights in 16 bits or int8 and KV cache resident, greedy only",
        refuses="engines.adapters.refusals:openvino",
        environment="openvino",
    ),
    "lm_eval_hf": EngineEntry(
        "engines.adapters.lm_eval_hf:LmEvalHfEngine",
        ("torch", "transformers", "safetensors", "accelerate", "lm_eval"),
        "eval",
        summary="lm-eval's own model of transformers: padded batches; weights in RAM, or as Accelerate places them",
        environment="accelerate",
    ),
    "openai_api": EngineEntry(
        "engines.adapters.openai_api:OpenAiApiEngine",
        ("aiohttp",),
        "client",
        summary="any OpenAI-compatible server, started by a command or given by its address; for online workloads",
        refuses="engines.adapters.refusals:openai_api",
        environment="accelerate",
    ),
    "offload": EngineEntry(
        "engines.offload.engine:OffloadEngine",
        ("torch", "transformers", "safetensors", "accelerate", "greenlet"),
        "offload",
        summary="our own: weights streamed from disk under the arithmetic, in row, zigzag or sweep order",
        longest="engines.planning.longest:longest_sequence",
        refuses="engines.offload.refusals:refuse",
        refuses_model="engines.offload.model.refusal:refuse",
        predicted=True,
        environment="offload",
        env={"OMP_WAIT_POLICY": "PASSIVE"},  # torch's idle threads leave the CPU to the pool that multiplies
    ),
}

_BY_SERVER = "runs behind engine openai_api: suite serve_gpu"
#: Engines that are not built: what each is, and why not.
NOT_BUILT = {
    "fastgen": ("DeepSpeed-FastGen (MII), for CUDA devices", _BY_SERVER),
    "tensorrt_llm": ("TensorRT-LLM, for NVIDIA devices", _BY_SERVER),
    "petals": (
        "collaborative inference over slow links",
        "installs only beside old packages (transformers < 4.35, pydantic < 2); suite network has our ranks instead",
    ),
}

#: `registry.launchers` adds those of plug-ins.
LAUNCHERS: Mapping[str, Entry] = {
    "process": Entry("harness.launchers.process:Processes"),
    "venv": Entry("harness.launchers.venv:VirtualEnvironments"),
    "docker": Entry("harness.launchers.docker:Containers", ("docker",), "docker"),
}
