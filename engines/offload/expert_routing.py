"""Which experts a pass needs: those that some batch routes tokens to. No other's tiles are read or multiplied."""

from collections.abc import Sequence

from engines.offload.memory.layout import Matrix
from engines.offload.weights.stream import WeightStream


class ExpertRouting:
    """The experts of one pass, over a model's `matrices` whose tiles come from `stream` or are resident.

    The tiles of experts that no batch of the pass needs are neither read nor multiplied.
    """

    def __init__(self, matrices: Sequence[Matrix], stream: WeightStream) -> None:
        self._stream = stream
        self._mixture = {m.name: m.parameter.rpartition(".")[0] for m in matrices if m.expert is not None}
        self._streamed: dict[str, list[tuple[int, str]]] = {}  # by mixture: tile, matrix
        for tile in stream.tiles:
            if tile.matrix in self._mixture:
                self._streamed.setdefault(self._mixture[tile.matrix], []).append((tile.index, tile.matrix))
        self._needed: set[str] = set()
        self._decided: set[str] = set()  # mixtures that all batches of this pass have routed

    def begin_pass(self) -> None:
        """Forgets the routes of the last pass."""
        self._needed.clear()
        self._decided.clear()

    def route(self, stacks: Sequence[str], experts: Sequence[int]) -> None:
        """A batch will ask for these experts' matrices in `stacks`, the parameters that hold them."""
        self._needed.update(f"{stack}[{expert}]" for stack in stacks for expert in experts)

    def is_expert(self, matrix: str) -> bool:
        """Whether a matrix is one expert's, which not every batch multiplies."""
        return matrix in self._mixture

    def needs(self, matrix: str) -> bool:
        """Whether some batch asks for a matrix. When the first of a mixture is due, all batches have routed it."""
        mixture = self._mixture.get(matrix)
        if mixture is None:
            return True
        if mixture not in self._decided:
            self._decided.add(mixture)
            unneeded = [index for index, name in self._streamed.get(mixture, ()) if name not in self._needed]
            self._stream.leave_out(unneeded)
        return matrix in self._needed
