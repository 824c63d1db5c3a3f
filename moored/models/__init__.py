"""Embedded models, each a Hugging Face folder with tokenizer and card; `recipes/` makes them."""
