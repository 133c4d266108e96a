"""What a run leaves in its output folder: checkpoints, exported models, and how a later run resumes from them."""
