"""Tables with columns of free text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from logitclip.own_data.kind import ENCODER_HINT
from logitclip.own_data.tables import Table


@dataclass(frozen=True, eq=False)
class Texts(Table):
    """A table with free text: TF-IDF features, a flatter network, and the text itself to show."""

    name: ClassVar[str] = "text"
    hint: ClassVar[str] = ENCODER_HINT

    def network(self, rows: int) -> dict[str, str | float]:
        return {**super().network(rows), "model": "mlp:width=256,depth=1"}

    @property
    def shown_columns(self) -> list[str]:
        return [name for name, kind in self.preprocessor.kinds.items() if kind == "text"]
