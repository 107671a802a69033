"""The maths of the models: blocks that know no family, no file and no Hub.

Shapes are in the names. One legend for the whole project:
    B batch, T query position, S key position, D model, N query heads, K key/value heads,
    G = N / K, H head dim, F hidden of the feed-forward, E experts, X experts per token, V vocab,
    C latent rank, R rope dim, M residual streams.
A suffix names logical dims, never shards. Einsum strings use the same letters. Weights are stored
(in..., out...) and named for what they do: wq_DNH, wo_NHD, w_gate_DF.
"""
