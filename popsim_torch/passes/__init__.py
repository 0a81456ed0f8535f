"""Steps that rewrite a program in place; ``pipeline`` says which and in which order."""
