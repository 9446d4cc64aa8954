"""Operators: pure tensor functions, one folder each.

In every folder `reference.py` is the definition (slow, any dtype, runs in float64) and the other files are faster paths
that are tested against it in output and gradients. The public function in the folder's `__init__` picks a path from
device and shape, takes `backend=` to force one, and a path that cannot run says why in one error. No nn.Module and no
configuration lives here.

    kda            Kimi Delta Attention: gated delta rule with a decay per key channel
    short_conv     causal depthwise convolution over packed documents
    attention      causal softmax attention that also returns the largest logit of each head
    mla_decode     one token against a paged latent cache, and against a grouped-query cache
    attnres        Attention Residuals: softmax mix of earlier layer outputs
    norm           RMSNorm, alone or after the residual sum
    gated_norm     RMSNorm per head with an output gate
    swiglu         the gated activation of the MLP
    cross_entropy  the head and its loss without all logits in memory
    newton_schulz  orthogonalisation for Muon

Own GPU kernels are Triton (`triton*.py`), run on CPU by Triton's interpreter in the tests, and are chosen by themselves
on CUDA; `triton_support.py` says where they can run. Nothing is tuned at run time: launch parameters are tables.

On a CPU matrix products are torch's; `cpu_products.py` has some processors do them by oneDNN, more than twice as fast.
"""
