"""Published coefficient sets of the quintic Newton-Schulz iteration, as data.

One tuple (a, b, c) per step: every singular value x of the normalised matrix becomes a x + b x^3 + c x^5.
The comment gives the slope at zero (product of the a: how much small singular values are lifted) and the range that
singular values in [3e-3, 1] end up in, both in exact arithmetic and both tested.

Only sets that also survive a singular value slightly above 1 are here, because a norm rounded to bfloat16 leaves one.
CANS (arXiv 2506.10935) sends 1 + 2^-7 to 5e88, and the AOL set flips the sign of values near 1: both need a
normalisation of their own.
"""

Coefficients = tuple[tuple[float, float, float], ...]

_JORDAN_STEP = (3.4445, -4.7750, 2.0315)

COEFFICIENTS: dict[str, Coefficients] = {
    # Jordan's Muon, Moonlight, Kimi K2, torch.optim.Muon. Slope 485, range 0.68-1.20: fast, never converges to 1.
    "jordan": (_JORDAN_STEP,) * 5,
    # You Jiacheng's five different steps, Megatron's default. Slope 493, range 0.98-1.15.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express (arXiv 2505.16932), five steps, safety 1.02, as used by modded-nanogpt. Slope 990, range 0.86-1.14.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Polar Express, eight steps from the lower bound 1e-3, every step but the last with safety 1.01.
    # Slope 6363, range 1.000-1.000.
    "polar_express_8": (
        (8.20516041400557, -22.90193498705603, 16.4607249101803),
        (4.0663951599427755, -2.8611540867551444, 0.5183995226694746),
        (3.9095949044379172, -2.823351735039515, 0.5250369769390021),
        (3.2855640171986122, -2.415301959635942, 0.48529406552790816),
        (2.2778732870839784, -1.619821765265443, 0.39848078704168405),
        (1.8725756512746525, -1.2307042574884322, 0.35851616209511766),
        (1.8564371097020254, -1.2132392818129258, 0.35679978936199364),
        (1.875, -1.25, 0.375),
    ),
    # DeepSeek-V4: eight fast steps, then two that converge. Slope 7.9e4, range 1.000-1.001.
    "deepseek_v4": (_JORDAN_STEP,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
