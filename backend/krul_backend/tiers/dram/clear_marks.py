"""What was begun before a model was cleared, and must not bring back anything of it."""

from __future__ import annotations

from krul_backend.segment import ModelIdentity


class ClearMarks:
    """A count of clears, by which whatever takes long is dated when it begins. Not thread-safe."""

    def __init__(self) -> None:
        self._count = 0
        self._all_at = 0
        self._model_at: dict[str, int] = {}

    @property
    def now(self) -> int:
        return self._count

    def clear(self, model: ModelIdentity | None) -> None:
        """Everything (of one model) that began until now is outdated."""
        self._count += 1
        if model is None:
            self._all_at = self._count
        else:
            self._model_at[model.fingerprint] = self._count

    def is_outdated(self, began_at: int, model: ModelIdentity) -> bool:
        """Whether ``model`` was cleared since ``began_at``, an earlier ``now``."""
        return began_at < max(self._all_at, self._model_at.get(model.fingerprint, 0))
