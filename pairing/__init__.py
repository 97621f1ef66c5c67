"""Facts about a (target, draft) pair: models, rows, tokenizers, acceptance. The lowest layer; imports no sibling."""
