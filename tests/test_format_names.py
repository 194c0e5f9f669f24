"""Names of formats, as a person types them."""

from __future__ import annotations

import pytest

from nanovllm_cli.errors import UsageError
from nanovllm_cli.quant.format import Blocks, Format, Fp8, Integer, Nf4
from nanovllm_cli.quant.format_names import FORMAT_NAMES, parse_format

KNOWN: dict[str, Format] = {
    "int8": Integer(8),
    "INT8": Integer(8),
    "int8-weight-only": Integer(8, activation="none"),
    "int8:group=64": Integer(8, 64),
    "int4": Integer(4, 128),
    "int4:group=32": Integer(4, 32),
    "int4:group=0": Integer(4, 0),
    "int4:group=64:zeros": Integer(4, 64, True),
    "int4:zeros:group=64": Integer(4, 64, True),
    "int4-weight-only:group=32": Integer(4, 32, activation="none"),
    "int3": Integer(3, 128),
    "fp8": Fp8(),
    "fp8:block=128": Fp8(128),
    "fp8-weight-only": Fp8(activation="none"),
    "nf4": Nf4(),
    "nf4:group=32": Nf4(32),
    "q8_0": Blocks("Q8_0"),
    "Q4_K": Blocks("Q4_K"),
}


@pytest.mark.parametrize("spec", KNOWN)
def test_a_name_is_a_format(spec: str) -> None:
    assert parse_format(spec) == KNOWN[spec]


@pytest.mark.parametrize("form", KNOWN.values(), ids=lambda form: form.name)
def test_a_format_is_found_by_its_own_name(form: Format) -> None:
    assert parse_format(form.name) == form


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_name_that_is_listed_is_known(name: str) -> None:
    assert parse_format(name).name.split(":")[0] == name


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("int5", "did you mean"),
        ("fp9", "did you mean fp8"),
        ("q4_k_x", "did you mean q4_k"),
        ("banana", "known: int8"),
        ("bf16", "nanovllm convert MODEL --outtype bf16 writes plain numbers"),
        ("FP16", "nanovllm convert MODEL --outtype f16 writes plain numbers"),
        ("4bit", "did you mean int4?"),
        ("awq", "read as it is; nanovllm quantize MODEL --to int4 --algorithm awq makes one"),
        ("compressed-tensors", "a checkpoint that was quantized so is read as it is"),
        ("", "known: int8"),
        ("int4:grup=32", "takes group, zeros"),
        ("int4:group=33", "known: 0, 32"),
        ("int4:group=", "known: 0, 32"),
        ("int4:group=99999999999999999999", "known: 0, 32"),
        ("int4:group=0000001280", "known: 0, 32"),
        ("int4:group=-32", "known: 0, 32"),
        ("int4:group=³", "known: 0, 32"),
        ("int4:zeros=1", "write :zeros"),
        ("int4:group=32:group=64", None),
        ("fp8:block=64", "known: 128"),
        ("fp8:group=32", "takes block"),
        ("q8_0:group=32", "takes none"),
        ("nf4:group=0", "known: 32"),
        ("nf4-weight-only", "known"),
        ("q8_0-weight-only", "known"),
    ],
)
def test_what_is_not_a_format_is_told_with_what_there_is(spec: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as told:
        parse_format(spec)
    assert hint is None or (told.value.hint is not None and hint in told.value.hint)


@pytest.mark.parametrize("spec", ["iq2_xxs", "IQ4_NL", "nvfp4"])
def test_a_type_that_is_only_read_says_who_writes_it(spec: str) -> None:
    with pytest.raises(UsageError, match=f"^{spec.lower()} can be read, not written\n") as told:
        parse_format(spec)
    assert "llama-quantize" in str(told.value.hint)
