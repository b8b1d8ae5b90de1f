"""logitclip: train on noisy labels by clipping the norm of the logits."""
