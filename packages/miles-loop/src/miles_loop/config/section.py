"""What every section of the configuration is made of: its base class and the types of plain values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
LAST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=LAST_PORT)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, docstrings become descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
