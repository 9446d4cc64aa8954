"""2^x and the logistic function inside Triton kernels, in one and four instructions.

    sigmoid(x) = 1 / (1 + 2^(-x log2 e))

Triton's own `exp2` and division repair denormal results, which costs as many instructions again; what is that small is
zero to everyone who adds it up or multiplies with it. Both approximations are within 2 units in the last place of
float32. Triton's interpreter knows no assembly and takes the plain formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.triton_support import INTERPRETED

if INTERPRETED:

    @triton.jit
    def power_of_two(x):
        return tl.exp2(x)

    @triton.jit
    def sigmoid(x):
        return 1.0 / (1.0 + tl.exp(-x))

else:

    @triton.jit
    def power_of_two(x):
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def sigmoid(x):
        power = power_of_two(x * -1.4426950408889634)
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
