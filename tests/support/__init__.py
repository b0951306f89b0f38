"""What several tests use: models, tokenizers, processors, launchers."""
