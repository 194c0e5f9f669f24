"""What the bodies of all APIs are made of.

null is the same as leaving a field out. Fields that nobody here knows are tolerated, as clients expect; those that are known and
cannot be done are refused by name (`Unsupported`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from nanovllm_cli.engine.engine import MAX_PRIORITY
from nanovllm_cli.sampling_fields import MAX_TOKEN_ID
from nanovllm_cli.server.api_error import ApiError

MAX_MESSAGES = 100_000
SHORT = 4096
"""Characters of a name, a label or a salt."""

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StrictModel(BaseModel):
    model_config = STRICT


def _refuse(value: object, info: ValidationInfo) -> None:
    if value is not None and value != []:
        raise ApiError(400, f"{info.field_name} is not supported", code="unsupported", param=info.field_name)


def _refuse_choice(value: object) -> None:
    if value is not None:
        raise ApiError(400, "lora: here an adapter is chosen by its name, as the model", code="unsupported", param="lora")


Unsupported = Annotated[None, BeforeValidator(_refuse)]
"""A field of OpenAI's, vLLM's or llama.cpp's that cannot be done here: only null is taken, and a list of none."""
ChosenByModel = Annotated[None, BeforeValidator(_refuse_choice)]
"""`lora` of a request that chooses an adapter by the model's name alone."""
Tolerated = Annotated[
    Any, BeforeValidator(lambda _: None), WithJsonSchema({"description": "Tolerated; has no effect on the answer"})
]
"""A field without a meaning for the answer: labels, and hints that only concern speed or the provider's bookkeeping.
It is not kept, however long the answer takes."""
ShortText = Annotated[str, StringConstraints(max_length=SHORT)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=SHORT)]
TokenId = Annotated[StrictInt, Field(ge=0, le=MAX_TOKEN_ID)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
JsonObject = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ImageDetail = Literal["auto", "low", "high", "original"]
"""OpenAI's. An image is made the size that a model was trained with, whatever is said."""


def at_most(count: int) -> BeforeValidator:
    """Of an object or a list, judged before millions of wrong entries are told one by one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > count:
            raise PydanticCustomError("too_long", f"has {len(value)} entries, at most {count} are taken")
        return value

    return BeforeValidator(check)


def explained(text: str) -> WrapValidator:
    """Around a union: one error that says what may stand there, instead of one for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("invalid_value", "must be " + text) from None

    return WrapValidator(validate)


FIRST_ERROR = Field(fail_fast=True)
"""For lists: millions of wrong entries are one error. To tell them all would hold the event loop for a minute."""

STOP_BESIDE_TOOLS = Field(
    default=None,
    description="What ends an answer. It is not looked for in one that tool_choice makes a call: it would cut the arguments.",
)
"""Of routes that take tools."""
