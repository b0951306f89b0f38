"""Training and evaluation with transformers' Trainer: a callback that evaluates by generating text, and the trainer
for block drafters with its data. It is built on `hf_specgen`, which never imports from here.
"""
