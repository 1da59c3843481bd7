"""A plug-in for crfm-helm, run by HELM's interpreter: it records HELM's requests to a model, or replays answers.

It imports nothing of this project, which HELM's environment does not have. The environment variable HARNESS_HELM_JOB
names a JSON file with `tokenizer` (a folder), `context` (tokens), `recording` (a file to which the client appends a
line for each new request) and `answers` (the texts in order of the requests, `num_completions` for each; null to
record).
"""

import json
import os
from pathlib import Path
from typing import Any

from helm.benchmark.model_deployment_registry import ClientSpec, ModelDeployment, register_model_deployment
from helm.benchmark.model_metadata_registry import get_unknown_model_metadata, register_model_metadata
from helm.benchmark.tokenizer_config_registry import TokenizerConfig, TokenizerSpec, register_tokenizer_config
from helm.clients.client import Client
from helm.common.request import GeneratedOutput, Request, RequestResult

NAME = "harness/model"
_RECORDED = ("prompt", "max_tokens", "temperature", "num_completions", "stop_sequences", "top_p", "random")
_UNSUPPORTED = ("embedding", "echo_prompt", "messages", "multimodal_prompt", "presence_penalty", "frequency_penalty")


class RecordingClient(Client):
    """Answers requests from the job's answers, or with empty texts, and records each distinct request."""

    def __init__(self) -> None:
        job = json.loads(Path(os.environ["HARNESS_HELM_JOB"]).read_text(encoding="utf-8"))
        self._answers = None if job["answers"] is None else iter(job["answers"])
        self._texts: dict[str, list[str]] = {}
        self._recording = Path(job["recording"])

    def make_request(self, request: Request) -> RequestResult:
        """HELM's call of a model; an unsupported option is an error of the request."""
        if unsupported := [name for name in _UNSUPPORTED if getattr(request, name)]:
            return _result([], f"engines do not support {', '.join(unsupported)}")
        recorded: dict[str, Any] = {name: getattr(request, name) for name in _RECORDED}
        key = json.dumps(recorded, sort_keys=True)
        if key not in self._texts:
            self._texts[key] = [self._next(request.stop_sequences) for _ in range(request.num_completions)]
            with self._recording.open("a", encoding="utf-8") as file:
                file.write(key + "\n")
        return _result(self._texts[key])

    def _next(self, stop_sequences: list[str]) -> str:
        """The next answer up to its first stop string: engines return the tokens that complete a stop string."""
        text = "" if self._answers is None else next(self._answers)
        return text[: min((end for stop in stop_sequences if (end := text.find(stop)) >= 0), default=len(text))]


def _result(texts: list[str], error: str | None = None) -> RequestResult:
    completions = [GeneratedOutput(text=text, logprob=0, tokens=[]) for text in texts]
    return RequestResult(success=error is None, cached=False, error=error, request_time=0, request_datetime=0,
                         completions=completions, embedding=[])  # fmt: skip


def _register() -> None:
    job = json.loads(Path(os.environ["HARNESS_HELM_JOB"]).read_text(encoding="utf-8"))
    folder = {"pretrained_model_name_or_path": job["tokenizer"]}
    hugging_face = TokenizerSpec("helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer", folder)
    register_tokenizer_config(TokenizerConfig(NAME, hugging_face, end_of_text_token="", prefix_token=""))
    register_model_metadata(get_unknown_model_metadata(NAME))
    client = ClientSpec(f"{__name__}.{RecordingClient.__name__}")
    register_model_deployment(
        ModelDeployment(NAME, client, NAME, NAME, max_sequence_length=job["context"],
                        max_sequence_and_generated_tokens_length=job["context"])
    )  # fmt: skip


_register()
