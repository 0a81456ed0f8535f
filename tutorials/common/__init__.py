"""What the tutorial scripts share: data and a working torchvision."""
