"""The derivative rules of common operations, in words; g is the gradient that arrives."""

# operation: (rule, whether each output element depends on the input element at its place only)
FORMULAS = {
    "Add": ("a + b: g to each", True),
    "Sub": ("a − b: g and −g", True),
    "Rsub": ("b − a: −g and g", True),
    "Mul": ("a · b: g · b and g · a", True),
    "Div": ("a / b: g / b and −g · a / b²", True),
    "Neg": ("−a: −g", True),
    "Pow": ("a ** n: g · n · a^(n−1)", True),
    "Sqrt": ("√a: g / (2 √a)", True),
    "Exp": ("exp a: g · exp a", True),
    "Log": ("log a: g / a", True),
    "Sin": ("sin a: g · cos a", True),
    "Cos": ("cos a: −g · sin a", True),
    "Tanh": ("tanh a: g · (1 − tanh² a)", True),
    "Sigmoid": ("s = sigmoid a: g · s · (1 − s)", True),
    "Relu": ("max(a, 0): g where a > 0, else 0", True),
    "Gelu": ("a · Φ(a): g · (Φ(a) + a · φ(a))", True),
    "Silu": ("a · sigmoid a: g · s · (1 + a · (1 − s))", True),
    "Abs": ("|a|: g · sign a", True),
    "Clamp": ("clamp a: g inside the bounds, else 0", True),
    "Where": ("where: g to the one that was taken", True),
    "MaskedFill": ("masked fill: g where not masked, else 0", True),
    "NativeDropout": ("dropout: g / (1 − p) where kept, else 0", True),
    "Round": ("round a: 0 almost everywhere", True),
    "Sign": ("sign a: 0 almost everywhere", True),
    "Clone": ("copy: g", True),
    "ToCopy": ("copy in another dtype or place: g", True),
    "Sum": ("Σ a: g to every element", False),
    "Mean": ("mean of n: g / n to every element", False),
    "Max": ("max a: g to the largest", False),
    "LinalgVectorNorm": ("‖a‖: g · a / ‖a‖", False),
    "Logsumexp": ("log Σ exp a: g · softmax a", False),
    "Dot": ("a · b: g · b and g · a", False),
    "Mv": ("A b: g bᵀ and Aᵀ g", False),
    "Mm": ("A B: g Bᵀ and Aᵀ g", False),
    "Bmm": ("A B for each in the batch: g Bᵀ and Aᵀ g", False),
    "Addmm": ("c + A B: g summed to the shape of c, g Bᵀ and Aᵀ g", False),
    "Convolution": ("a ∗ w: g ∗ turned w, a ∗ g, and g summed", False),
    "Softmax": ("s = softmax a: s · (g − Σ g · s)", False),
    "LogSoftmax": ("log softmax a: g − softmax a · Σ g", False),
    "NllLoss": ("−a[label], mean: −g / n at each label", False),
    "MseLoss": ("mean (a − y)²: g · 2 (a − y) / n", False),
    "NativeLayerNorm": ("(a − mean) / std · w + b: mean and slope along a taken out of g · w / std", False),
    "NativeBatchNorm": ("(a − mean) / std · w + b: mean and slope along a taken out of g · w / std", False),
    "Embedding": ("rows of w: g added to each row that was read", False),
    "Unbind": ("taken apart: the gradients of the slices, stacked", False),
    "Cat": ("joined: g cut at the joints", False),
    "Stack": ("stacked: g cut into its slices", False),
    "Expand": ("repeated: g summed over the repeats", False),
    "Select": ("a[i]: g at i, 0 elsewhere", False),
    "Slice": ("a[i:j]: g at i to j, 0 elsewhere", False),
    "Index": ("a[index]: g added at the index, 0 elsewhere", False),
}
SAME_RULE = {"CudnnBatchNorm": "NativeBatchNorm", "MulTensor": "Mul", "NllLoss2D": "NllLoss", "Amax": "Max"}
RESHAPING = {"View", "UnsafeView", "Reshape", "ReshapeAlias", "T", "Transpose", "Permute", "Squeeze", "Unsqueeze"}


def formula_of(operation: str) -> str:
    """Return the rule of an operation; a custom function's is its own.

    Examples
    --------
    >>> formula_of("Tanh"), formula_of("View")
    ('tanh a: g · (1 − tanh² a)', 'same elements, other shape: g in the old shape')
    """
    if operation in RESHAPING:
        return "same elements, other shape: g in the old shape"
    known = FORMULAS.get(SAME_RULE.get(operation, operation))
    return known[0] if known else "its own backward rule"


def is_elementwise(operation: str) -> bool:
    """Return whether an operation's derivative is a number for each element.

    Examples
    --------
    >>> is_elementwise("Tanh"), is_elementwise("Mm")
    (True, False)
    """
    return FORMULAS.get(operation, ("", False))[1]
