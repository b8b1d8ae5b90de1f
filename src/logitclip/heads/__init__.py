"""The losses of a last linear layer, for up to millions of classes: the whole logits are never stored.

`linear_cross_entropy` and `LinearLogitClip` take the hidden states and the weight of the layer. Rows are processed in
blocks, and the gradient with respect to a block of logits is computed together with its loss, so that three matrix
products suffice, as without fusion. `clip_hidden` does only the clip, for other fused kernels::

    layer    the public functions
    fused    from a criterion to blocks of rows
    blocks   the logits of a block, in chunks of classes
"""

from logitclip.heads.layer import LinearLogitClip, clip_hidden, gram_matrix, linear_cross_entropy

__all__ = ["LinearLogitClip", "clip_hidden", "gram_matrix", "linear_cross_entropy"]
