"""A plug-in of crfm-helm, run by HELM's own interpreter: it notes what HELM asks a model, or gives answers to it.

Nothing of this project is imported here: HELM's environment does not have it. The environment variable HARNESS_HELM_JOB
names a JSON file: `tokenizer` (a folder), `context` (tokens), `asked` (a file that gets a line for each new request)
and `answers` (texts to the requests in that order, as many as each wants; none while HELM is only to ask).
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
_ASKED = ("prompt", "max_tokens", "temperature", "num_completions", "stop_sequences", "top_p", "random")
_UNKNOWN = ("embedding", "echo_prompt", "messages", "multimodal_prompt", "presence_penalty", "frequency_penalty")


class NotedClient(Client):
    """Answers requests from a file, and notes those that it has no answer to."""

    def __init__(self) -> None:
        job = json.loads(Path(os.environ["HARNESS_HELM_JOB"]).read_text(encoding="utf-8"))
        self._left = None if job["answers"] is None else iter(job["answers"])
        self._known: dict[str, list[str]] = {}
        self._asked = Path(job["asked"])

    def make_request(self, request: Request) -> RequestResult:
        """The answers that there are, or else empty ones."""
        if unknown := [name for name in _UNKNOWN if getattr(request, name)]:
            return _result([], f"engines are not asked by {', '.join(unknown)}")
        asked: dict[str, Any] = {name: getattr(request, name) for name in _ASKED}
        key = json.dumps(asked, sort_keys=True)
        if key not in self._known:
            self._known[key] = [self._next(request.stop_sequences) for _ in range(request.num_completions)]
            with self._asked.open("a", encoding="utf-8") as file:
                file.write(key + "\n")
        return _result(self._known[key])

    def _next(self, stop_sequences: list[str]) -> str:
        """The next answer up to where it stops: engines give the tokens that complete a stop string."""
        text = "" if self._left is None else next(self._left)
        return text[: min((at for stop in stop_sequences if (at := text.find(stop)) >= 0), default=len(text))]


def _result(texts: list[str], error: str | None = None) -> RequestResult:
    given = [GeneratedOutput(text=text, logprob=0, tokens=[]) for text in texts]
    return RequestResult(success=error is None, cached=False, error=error, request_time=0, request_datetime=0,
                         completions=given, embedding=[])  # fmt: skip


def _register() -> None:
    job = json.loads(Path(os.environ["HARNESS_HELM_JOB"]).read_text(encoding="utf-8"))
    folder = {"pretrained_model_name_or_path": job["tokenizer"]}
    hugging_face = TokenizerSpec("helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer", folder)
    register_tokenizer_config(TokenizerConfig(NAME, hugging_face, end_of_text_token="", prefix_token=""))
    register_model_metadata(get_unknown_model_metadata(NAME))
    client = ClientSpec(f"{__name__}.{NotedClient.__name__}")
    register_model_deployment(
        ModelDeployment(NAME, client, NAME, NAME, max_sequence_length=job["context"],
                        max_sequence_and_generated_tokens_length=job["context"])
    )  # fmt: skip


_register()
