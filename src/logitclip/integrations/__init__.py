"""LogitClip in other libraries: scikit-learn, Hugging Face, Lightning and skorch. Each needs the extra of its name."""
