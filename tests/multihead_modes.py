"""What the tests of MultiHeadAttention share: tolerances, and the modes a module is used in."""

import torch

F64 = {"dtype": torch.float64}
TOLERANCE = {"atol": 1e-12, "rtol": 1e-12}  # float64: some thousand units in the last place
MODES = ["train", "eval", "eval_no_grad"]


def in_mode(module, mode):
    module.train(mode == "train")
    return torch.no_grad() if mode == "eval_no_grad" else torch.enable_grad()
