"""The shared parts of the tutorial scripts: data, and a torchvision that can be imported."""
