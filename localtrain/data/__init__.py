"""From sources to packed batches: sources -> tokens -> shards + index -> rows -> batches.

`sources` finds files and reads documents, `tokenizer` turns text into ids, `shards` is the file
format, `build` writes shards once into a cache, `pack` decides which documents share a row,
`order` says which row comes when, `loader` puts it together. No jax here: batches are numpy arrays.
"""
