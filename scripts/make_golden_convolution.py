"""Write `tests/golden/convolution.npz`, golden vectors of image layers computed by PyTorch.

    pip install torch==2.13.0 numpy
    python scripts/make_golden_convolution.py

Arrays are float64 in the engine's layout: images are b h w c, kernels k l i f (PyTorch's are b c h w and f i k l). For
each case KIND/NAME the file holds (x the input, y the output, dy seeded normals, d... gradients of sum(y * dy)):

    conv2d/NAME/...         x, w, y, dy, dx, dw, groups
    max_pool/NAME/...       x, y, dy, dx; x has few different values, so that many in a window are equal
    average_pool/NAME/...   x, y, dy, dx, count_include_pad
        and for these windows [2, 5]: for rows and for columns the size, stride, dilation, and padding before and after
        (possibly negative)
    batch_norm/NAME/...     x, scale, shift, y, dy, dx, dscale, dshift, epsilon, momentum; the running mean, variance
                            before a forward in training, and new_mean, new_variance after it
    group_norm/NAME/...     x, scale, shift, y, dy, dx, dscale, dshift, epsilon, groups
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

PATH = Path(__file__).resolve().parent.parent / "tests" / "golden" / "convolution.npz"
SEED = 20240607

#: For rows and for columns: size, stride, dilation, padding before, padding after.
PLAIN, STRIDED, EVEN = (3, 1, 1, 1, 1), (3, 2, 1, 1, 1), (2, 1, 1, 0, 1)
CONVOLUTIONS = {  # x's shape, i, f, groups, rows, columns
    "3x3": ((2, 5, 6, 3), 4, 1, PLAIN, PLAIN),
    "1x1": ((2, 3, 2, 5), 4, 1, (1, 1, 1, 0, 0), (1, 1, 1, 0, 0)),
    "1x1 stride 2": ((2, 5, 4, 3), 4, 1, (1, 2, 1, 0, 0), (1, 2, 1, 0, 0)),
    "stride 2": ((1, 7, 8, 3), 4, 1, STRIDED, STRIDED),
    "7x7 stride 2": ((1, 10, 9, 2), 3, 1, (7, 2, 1, 3, 3), (7, 2, 1, 3, 3)),
    "stride 3": ((1, 8, 10, 2), 3, 1, (2, 3, 1, 1, 0), (4, 3, 1, 2, 2)),
    "dilated": ((1, 9, 8, 2), 3, 1, (3, 1, 2, 2, 2), (2, 1, 3, 1, 2)),
    "dilated, stride 2": ((1, 9, 10, 2), 3, 1, (3, 2, 2, 2, 1), (3, 2, 3, 3, 3)),
    "dilated, stride 4": ((1, 12, 11, 2), 3, 1, (3, 4, 2, 1, 3), (4, 3, 3, 4, 5)),
    "even and asymmetric": ((1, 5, 6, 2), 3, 1, EVEN, (4, 1, 1, 1, 2)),
    "negative padding": ((1, 7, 8, 2), 3, 1, (3, 1, 1, -1, 2), (3, 2, 1, 1, -2)),
    "groups": ((1, 5, 6, 6), 4, 2, PLAIN, STRIDED),
    "depthwise": ((2, 6, 5, 4), 4, 4, PLAIN, STRIDED),
    "depthwise, two outputs a channel": ((2, 6, 5, 3), 6, 3, STRIDED, (3, 1, 2, 2, 2)),
}
POOLS = {  # x's shape, rows, columns: PyTorch pads at most half a window, equally at both ends
    "2x2": ((2, 6, 5, 2), (2, 2, 1, 0, 0), (2, 2, 1, 0, 0)),
    "3x3 stride 2": ((1, 7, 8, 3), STRIDED, STRIDED),
    "overlapping": ((1, 6, 7, 2), PLAIN, (5, 1, 1, 2, 2)),
    "with gaps": ((1, 7, 8, 2), (2, 3, 1, 1, 1), (1, 2, 1, 0, 0)),
}
DILATED = {"dilated": ((1, 9, 8, 2), (3, 2, 2, 1, 1), (2, 1, 3, 1, 1))}  # PyTorch has dilation in max pooling only


def to_torch(x):
    """b h w c as b c h w; k l i f as f i k l."""
    return (x.permute(0, 3, 1, 2) if x.dim() == 4 else x).contiguous().requires_grad_()


def back(x):
    return x.detach().permute(0, 2, 3, 1)


def convolution(normal, shape, f, groups, rows, columns):
    x, w = normal(*shape), normal(rows[0], columns[0], shape[3] // groups, f)
    image, kernel = to_torch(x), w.permute(3, 2, 0, 1).contiguous().requires_grad_()
    padded = F.pad(image, (*columns[3:], *rows[3:]))
    y = F.conv2d(padded, kernel, None, (rows[1], columns[1]), 0, (rows[2], columns[2]), groups)
    dy = normal(*back(y).shape)
    y.backward(dy.permute(0, 3, 1, 2))
    arrays = {"x": x, "w": w, "y": back(y), "dy": dy, "dx": back(image.grad), "dw": kernel.grad.permute(2, 3, 1, 0)}
    return arrays | {"groups": groups, "windows": (rows, columns)}


def pool(normal, shape, rows, columns, run, few):
    x = torch.round(normal(*shape)) if few else normal(*shape)
    image = to_torch(x)
    y = run(image, (rows[0], columns[0]), (rows[1], columns[1]), (rows[3], columns[3]))
    dy = normal(*back(y).shape)
    y.backward(dy.permute(0, 3, 1, 2))
    return {"x": x, "y": back(y), "dy": dy, "dx": back(image.grad), "windows": (rows, columns)}


def norm(normal, shape, run):
    x, scale, shift = normal(*shape), (1 + normal(shape[3])).requires_grad_(), normal(shape[3]).requires_grad_()
    image = to_torch(x)
    y = run(image, scale, shift)
    dy = normal(*shape)
    y.backward(dy.permute(0, 3, 1, 2))
    return {
        "x": x,
        "scale": scale,
        "shift": shift,
        "y": back(y),
        "dy": dy,
        "dx": back(image.grad),
        "dscale": scale.grad,
        "dshift": shift.grad,
        "epsilon": 1e-5,
    }


def batch_norm(normal, shape, momentum=0.1):
    mean, variance = normal(shape[3]), 0.5 + normal(shape[3]) ** 2
    after = mean.clone(), variance.clone()
    arrays = norm(normal, shape, lambda x, scale, shift: F.batch_norm(x, *after, scale, shift, True, momentum, 1e-5))
    return arrays | {
        "mean": mean,
        "variance": variance,
        "new_mean": after[0],
        "new_variance": after[1],
        "momentum": momentum,
    }


def golden():
    """All cases by name."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    cases = {f"conv2d/{name}": convolution(normal, *case) for name, case in CONVOLUTIONS.items()}
    for name, case in (POOLS | DILATED).items():
        dilation = case[1][2], case[2][2]
        run = lambda x, size, stride, padding, d=dilation: F.max_pool2d(x, size, stride, padding, d)
        cases[f"max_pool/{name}"] = pool(normal, *case, run, few=True)
    for name, case in POOLS.items():
        for counted in (True, False):
            run = lambda *how, counted=counted: F.avg_pool2d(*how, ceil_mode=False, count_include_pad=counted)
            arrays = pool(normal, *case, run, few=False) | {"count_include_pad": counted}
            cases[f"average_pool/{name}, padding {'counted' if counted else 'not counted'}"] = arrays
    for shape in ((3, 4, 5, 6), (1, 1, 7, 2)):
        cases[f"batch_norm/{shape}"] = batch_norm(normal, shape)
    for shape, groups in (((2, 4, 3, 6), 2), ((2, 3, 2, 4), 4), ((2, 2, 3, 6), 1)):
        run = lambda x, scale, shift, groups=groups: F.group_norm(x, groups, scale, shift, 1e-5)
        cases[f"group_norm/{shape} in {groups}"] = norm(normal, shape, run) | {"groups": groups}
    return cases


def main():
    """Write the file and list its content."""
    arrays = {
        f"{case}/{name}": np.array(value.detach().numpy() if torch.is_tensor(value) else value, order="C")
        for case, values in golden().items()
        for name, value in values.items()
    }
    PATH.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH.name}: {len(arrays)} arrays, {PATH.stat().st_size} bytes, torch {torch.__version__}")


if __name__ == "__main__":
    main()
