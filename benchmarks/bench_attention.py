import torch, time
