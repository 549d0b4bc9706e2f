"""Any endpoint that speaks OpenAI's embeddings: OpenAI, vLLM, Ollama, llama.cpp's server, a gateway."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from kilburn.errors import MissingExtra, ModelError, SpecError
from kilburn.models.hosted import SdkClient
from kilburn.models.retry import Retry


class Remote(SdkClient):
    """A model behind an embeddings endpoint.

    Args:
        model: its name there.
        dimensions: numbers in its vectors, such as 1536; another number from the endpoint is an error.
        base_url: of the endpoint, with its version ("http://127.0.0.1:8000/v1"); None is OpenAI, or what OPENAI_BASE_URL
            says. It may hold no password: the embedder's name, which the store keeps, has it.
        api_key: None takes OPENAI_API_KEY; a `base_url` that needs none may go without.
        batch: texts in a call at most.
        timeout: seconds for a call, with all its tries.
        retry: how failed calls are repeated.

    Raises:
        MissingExtra: the extra `openai` is not installed.
        SpecError: dimensions or URL that cannot be.
        Refused: no key.
    """

    def __init__(
        self,
        model: str,
        dimensions: int,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        batch: int = 64,
        timeout: float = 60.0,
        retry: Retry | None = None,
    ) -> None:
        if not isinstance(dimensions, int) or not 0 < dimensions <= 65_536 or batch < 1 or timeout <= 0:
            raise SpecError(
                f"{dimensions!r} dimensions, {batch!r} texts in a call, {timeout} seconds", advice="give numbers above 0"
            )
        if base_url is not None and urlsplit(base_url).password is not None:
            raise SpecError("a base URL with a password", advice="give it as api_key, or in OPENAI_API_KEY")
        super().__init__("openai", model, timeout, retry)
        try:
            self._numpy = import_module("numpy")
        except ModuleNotFoundError as error:
            raise MissingExtra("numpy", "embed") from error
        self.name = f"remote({model!r}, {dimensions}, {base_url!r})"
        self.dimensions = dimensions
        self._model, self._batch = model, batch
        self._client = self._openai(base_url, api_key)

    def embed(self, texts: Sequence[str]) -> Any:
        """Return a row of length 1 for each text.

        Raises:
            Refused, Overlong, RateLimited, Unavailable: see `kilburn.errors`.
            ModelError: the endpoint sent something else than one vector of these dimensions for each text.
        """
        np = self._numpy
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        for start in range(0, len(texts), self._batch):
            # An empty text is refused by most endpoints, and a lone surrogate cannot be sent.
            batch = [text.encode("utf-8", "replace").decode() or " " for text in texts[start : start + self._batch]]
            (rows,) = self._retry.stream(lambda timeout, batch=batch: self._once(batch, timeout), self._timeout)  # type: ignore[misc]
            vectors[start : start + len(batch)] = rows
        return vectors

    def _once(self, texts: list[str], timeout: float | None) -> Generator[Any, None, None]:
        try:
            response = self._client.embeddings.create(model=self._model, input=texts, encoding_format="float", timeout=timeout)
            rows = [(item.index, item.embedding) for item in response.data]
        except (self._sdk.APIError, self._network_error) as error:
            raise self._translate_error(error, False) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.name} sent what are no embeddings: {error!r}", advice="check the base URL") from error
        yield self._checked(rows, len(texts))

    def _checked(self, rows: list[tuple[Any, Any]], count: int) -> Any:
        np = self._numpy
        if sorted(str(index) for index, _ in rows) != sorted(map(str, range(count))):
            raise ModelError(f"{self.name} sent {len(rows)} vectors for {count} texts", advice="check the endpoint")
        try:
            vectors = np.array([row for _, row in sorted(rows, key=lambda indexed: int(indexed[0]))], np.float64)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{self.name} sent vectors that are no numbers, or of several lengths") from error
        if vectors.ndim != 2 or vectors.shape[1] != self.dimensions:
            problem = f"{self.name} sent vectors of {vectors.shape[1:]} numbers instead of {self.dimensions}"
            raise ModelError(problem, advice="give the model's own number of dimensions")
        with np.errstate(all="ignore"):
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(lengths).all() or not (lengths > 0).all():
            raise ModelError(f"{self.name} sent a vector without a direction", advice="check the model")
        return vectors / lengths
