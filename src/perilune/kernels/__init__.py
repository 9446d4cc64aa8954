"""Operators: pure tensor functions, one folder each.

In every folder `reference.py` is the definition (slow, any dtype, runs in float64) and the other files are faster paths
that are tested against it in output and gradients. The public function in the folder's `__init__` picks a path from
device and shape, takes `backend=` to force one, and a path that cannot run says why in one error. No nn.Module and no
configuration lives here.

    kda          Kimi Delta Attention: gated delta rule with a decay per key channel
    short_conv   causal depthwise convolution over packed documents
    attention    causal softmax attention that also returns the largest logit of each head
    attnres      Attention Residuals: softmax mix of earlier layer outputs
    newton_schulz  orthogonalisation for Muon
"""
