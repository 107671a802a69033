"""Places to train, one file each; found through the entry points `localtrain.backends`.

The core never imports this package: other packages register backends in the same way.
"""
