"""The formats of tensors in GGUF: ggml's numbers of them, their names and sizes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """numbers: of a block, which is num_bytes long; a plain format has blocks of one number."""

    name: str
    numbers: int
    num_bytes: int

    @property
    def is_plain(self) -> bool:
        return self.numbers == 1


# By ggml's number. Plain ones have the names of safetensors' dtypes.
FORMATS = {
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18),
    3: Format("Q4_1", 32, 20),
    6: Format("Q5_0", 32, 22),
    7: Format("Q5_1", 32, 24),
    8: Format("Q8_0", 32, 34),
    10: Format("Q2_K", 256, 84),
    11: Format("Q3_K", 256, 110),
    12: Format("Q4_K", 256, 144),
    13: Format("Q5_K", 256, 176),
    14: Format("Q6_K", 256, 210),
    16: Format("IQ2_XXS", 256, 66),
    17: Format("IQ2_XS", 256, 74),
    18: Format("IQ3_XXS", 256, 98),
    19: Format("IQ1_S", 256, 50),
    20: Format("IQ4_NL", 32, 18),
    21: Format("IQ3_S", 256, 110),
    22: Format("IQ2_S", 256, 82),
    23: Format("IQ4_XS", 256, 136),
    24: Format("I8", 1, 1),
    25: Format("I16", 1, 2),
    26: Format("I32", 1, 4),
    27: Format("I64", 1, 8),
    28: Format("F64", 1, 8),
    29: Format("IQ1_M", 256, 56),
    30: Format("BF16", 1, 2),
    34: Format("TQ1_0", 256, 54),
    35: Format("TQ2_0", 256, 66),
    39: Format("MXFP4", 32, 17),
}
