"""Triton's interpreter, without what it does over and over again. Most of the tests' time is spent in it.

For every call of a helper inside a kernel it looks through all names of `triton.language` and puts its own functions in place of
those that are there already; for every operation it makes a table of dtypes; and it computes sums of integers a second time, to
see whether 32 bits hold them, and does nothing with the answer. Most of all, every operation makes types, shapes and checks anew
for operands like those of a thousand operations before it, which takes ten times as long as the numbers do. So what depends on
types and shapes alone is remembered, and the commonest cases are answered at once; all others are left to the interpreter.

Seen in Triton 3.9; where these functions have other names, it stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply"}
COMPARISONS = {
    "less_than": "less",
    "less_equal": "less_equal",
    "greater_than": "greater",
    "greater_equal": "greater_equal",
    "equal": "equal",
    "not_equal": "not_equal",
}
BITWISE = {"and_": "bitwise_and", "or_": "bitwise_or", "xor_": "bitwise_xor"}
"""what numpy calls them"""
DIRECT = {
    **{f"__{name}__": (name, False, (True,)) for name in ARITHMETIC},
    **{f"__r{name}__": (name, True, (True,)) for name in ARITHMETIC},
    **{f"__{short}__": (name, False, ()) for short, name in zip(("lt", "le", "gt", "ge", "eq", "ne"), COMPARISONS, strict=True)},
    **{f"__{name.rstrip('_')}__": (name, False, ()) for name in BITWISE},
}
"""operators of tensors: what does their work, whether the other operand comes first, and what is said besides"""
NAMES = {
    "interpreter": (
        *("_patch_lang", "_get_np_dtype", "_LangPatchScope", "_patch_attr", "_validate_np_data_size", "GridExecutor"),
        *("interpreter_builder", "interpreter_semantic", "InterpreterBuilder", "TensorHandle"),
    ),
    "core": ("_unwrap_if_constexpr", "block_type", "pointer_type", "constexpr", "tensor", "dtype", "int1"),
    "semantic": (
        *("binary_op_type_checking_impl", "broadcast_impl_value", "computation_type_impl", "scalar_constant"),
        *("_cast_to_computation_type", "to_tensor_type", "make_tensor", "where", "expand_dims"),
        *(*ARITHMETIC, *COMPARISONS, *BITWISE),
    ),
}
"""what is replaced, or needed for it"""
PLAIN = frozenset({"fp32", "fp64", "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
"""two operands of one of these types are not converted, whatever is done with them"""


def make_quick() -> None:
    """Changes the interpreter in place. Kernels compute what they computed before, up to how products are rounded."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    for name, place in (("interpreter", interpreter), ("core", core), ("semantic", TritonSemantic)):
        if not all(hasattr(place, x) for x in NAMES[name]):
            return
    builder = interpreter.interpreter_builder
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=False)
    remember_dtypes(interpreter)
    patch_once_a_launch(interpreter)
    call_builtins_directly(interpreter)
    check_handles_quickly(interpreter)
    unwrap_by_type(core)
    remember_types(core, builder)
    answer_common_cases(core, TritonSemantic)
    compute_at_once(interpreter, core, TritonSemantic)
    round_products_alike(interpreter)


def round_products_alike(interpreter: Any) -> None:
    """What a row and a column give does not depend on where they stand in a tile, as on a card.

    On CPUs without AVX-512 numpy rounds the last columns of a product in another way than the first ones. So products in float32
    are summed up in float64, and rounded once.
    """
    np, handle = interpreter.np, interpreter.TensorHandle
    multiply = interpreter.InterpreterBuilder.create_dot
    single = np.dtype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if not (a.data.dtype == b.data.dtype == d.data.dtype == single):
            return multiply(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(single)
        return handle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def remember_dtypes(interpreter: Any) -> None:
    known: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def np_dtype(dtype: Any) -> Any:
        # By name: blocks and pointers have no hash. All pointers are alike.
        scalar = dtype.element_ty if isinstance(dtype, interpreter.tl.block_type) else dtype
        name = "pointer" if isinstance(scalar, interpreter.tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = np_dtype


def patch_once_a_launch(interpreter: Any) -> None:
    language = (interpreter.tl, interpreter.tl.core)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()
    """which of the two are in place, in the launch that is under way"""
    put: dict[tuple[frozenset[int], frozenset[int]], list[tuple[Any, str, Any]]] = {}
    """what is put where, by what is in place and what a kernel sees"""

    @functools.cache
    def seen_by(fn: Any) -> frozenset[int]:
        return frozenset(id(x) for x in fn.__globals__.values() if inspect.ismodule(x) and x in language)

    def patch_once(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen and seen <= done:
            return interpreter._LangPatchScope()
        key = (frozenset(done), seen)
        done.update(seen)
        if key in put:
            scope = interpreter._LangPatchScope()
            for place, name, member in put[key]:
                scope.set_attr(place, name, member)
            return scope
        scope = patch(fn)
        names = {(id(place), name): (place, name) for place, name, _ in scope._changes}
        put[key] = [(place, name, inspect.getattr_static(place, name)) for place, name in names.values()]
        return scope

    @functools.wraps(launch)
    def launch_anew(self: Any, *arguments: Any, **options: Any) -> Any:
        done.clear()
        try:
            return launch(self, *arguments, **options)
        finally:
            done.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


def call_builtins_directly(interpreter: Any) -> None:
    """Without a look at whether the argument is there that is always given here; operators without a function in between."""
    semantic, core = interpreter.interpreter_semantic, interpreter.tl.core

    def operator(name: str, other_first: bool, options: tuple[bool, ...]) -> Any:
        run, unwrap = getattr(semantic, name), core._unwrap_if_constexpr
        if other_first:
            return lambda self, other: run(unwrap(other), self, *options)
        return lambda self, other: run(self, unwrap(other), *options)

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if place is core.tensor and name in DIRECT:
            scope.set_attr(place, name, operator(*DIRECT[name]))
            return
        own = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return own(*arguments, **options)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attr


def check_handles_quickly(interpreter: Any) -> None:
    """A numpy array may not be wider than its type, as before; where a type has no width, the interpreter says."""
    check = interpreter._validate_np_data_size

    def holds(array: Any, dtype: Any) -> bool:
        bits = dtype.__dict__.get("primitive_bitwidth")
        return check(array, dtype) if bits is None else array.itemsize * 8 <= bits or array.itemsize == 1

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        bits = dtype.__dict__.get("primitive_bitwidth")
        if bits is None or data.itemsize * 8 > bits:
            self.__post_init__()

    interpreter._validate_np_data_size = holds
    interpreter.TensorHandle.__init__ = init


def unwrap_by_type(core: Any) -> None:
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    others = frozenset({core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)})

    def quickly(x: Any) -> Any:
        kind = type(x)
        if kind in others:
            return x
        return x.value if kind is constexpr else unwrap(x)

    core._unwrap_if_constexpr = quickly


def remember_types(core: Any, builder: Any) -> None:
    """Types with the same elements and shape share their shapes, which nobody changes; so do tensors of the same type."""
    constexpr, block_type, tensor, dtype = core.constexpr, core.block_type, core.tensor, core.dtype
    make_type, make_tensor, equal = block_type.__init__, tensor.__init__, dtype.__eq__
    change, to_ir = block_type.with_element_ty, block_type.to_ir
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    changed: dict[tuple[str, str], Any] = {}
    only_int = {int}

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[x.value if type(x) is constexpr else x for x in shape])
        like = types.get(key)
        # A shape of other numbers, such as 16.0, is an error; it must not be taken for that of the integers it equals.
        if like is None or not only_int.issuperset(map(type, key[1:])):
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(like)
            self.element_ty = element_ty

    def with_elements(self: Any, element_ty: Any) -> Any:
        if type(element_ty) is not dtype:
            return change(self, element_ty)
        key = (self.name, element_ty.name)
        if key not in changed:
            changed[key] = change(self, element_ty)
        return changed[key]

    def itself(self: Any, to: Any) -> Any:
        # The interpreter has no types of its own: it would make an equal one.
        return self if to is builder and type(self.element_ty) is dtype else to_ir(self, to)

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        like = tensors.get(type.name)
        if like is None:
            make_tensor(self, handle, type)
            tensors[type.name] = dict(self.__dict__)
        else:
            self.__dict__.update(like)
            self.handle, self.type, self.dtype = handle, type, type.scalar

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    block_type.__init__, block_type.with_element_ty, block_type.to_ir = new_type, with_elements, itself
    tensor.__init__, dtype.__eq__ = new_tensor, same
    integers = frozenset(dtype.SINT_TYPES + dtype.UINT_TYPES)
    dtype.is_int = lambda self: self.name in integers


def answer_common_cases(core: Any, semantic: Any) -> None:
    tensor, block_type, pointer_type = core.tensor, core.block_type, core.pointer_type
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    promote, constant = semantic.computation_type_impl, semantic.scalar_constant
    promoted: dict[tuple[Any, ...], Any] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def splat(self: Any, x: Any, like: Any) -> Any:
        kind = like.with_element_ty(x.dtype)
        return self.make_tensor(self.builder.create_splat(kind, x.handle), kind)

    def broadcast_quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if type(left) is not block_type:
            return (splat(self, lhs, right) if type(right) is block_type else lhs), rhs
        if type(right) is not block_type:
            return lhs, splat(self, rhs, left)
        a, b = left.shape.values, right.shape.values
        if a == b:
            return lhs, rhs
        if len(a) != len(b) or any(x != y and x != 1 and y != 1 for x, y in zip(a, b, strict=True)):
            return broadcast(self, lhs, rhs)
        shape = [y if x == 1 else x for x, y in zip(a, b, strict=True)]
        if a != shape:
            lhs = self.make_tensor(self.builder.create_broadcast(lhs.handle, shape), block_type(lhs.dtype, shape))
        if b != shape:
            rhs = self.make_tensor(self.builder.create_broadcast(rhs.handle, shape), block_type(rhs.dtype, shape))
        return lhs, rhs

    def promote_once(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return promoted[key]

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or dtype.name not in PLAIN or type(value) not in (int, float) or value == 0:
            return constant(self, value, dtype)  # among them -0.0, which is not 0.0
        key = (type(value), value, dtype.name)
        if key not in constants:
            made = constant(self, value, dtype).handle
            made.data.flags.writeable = False
            constants[key] = made
        return self.make_tensor(constants[key], dtype)

    def check_quickly(
        self: Any,
        lhs: Any,
        rhs: Any,
        pointer_left: bool = False,
        pointer_right: bool = False,
        numbers: bool = True,
        div: bool = False,
    ) -> Any:
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            a, b = lhs.dtype, rhs.dtype
            if (a.name == b.name and a.name in PLAIN) or (pointer_left and type(a) is pointer_type and b.is_int()):
                return self.broadcast_impl_value(lhs, rhs)
        elif numbers and left is tensor and right in (int, float) and lhs.dtype.name in PLAIN:
            both = self.computation_type_impl(lhs.dtype, False, self.to_tensor_type(rhs), True, div)
            if both.name == lhs.dtype.name:
                return self.broadcast_impl_value(lhs, self._cast_to_computation_type(rhs, both))
        return check(self, lhs, rhs, pointer_left, pointer_right, numbers, div)

    semantic.broadcast_impl_value = broadcast_quickly
    semantic.computation_type_impl = promote_once
    semantic.scalar_constant = constant_once
    semantic.binary_op_type_checking_impl = check_quickly


def compute_at_once(interpreter: Any, core: Any, semantic: Any) -> None:
    """Sums, products, comparisons and choices without the steps in between: types are looked up, and numpy does the rest."""
    tensor, block_type, pointer_type = core.tensor, core.block_type, core.pointer_type
    np, handle, np_dtype = interpreter.np, interpreter.TensorHandle, interpreter._get_np_dtype
    plain, numbers = PLAIN - {"int1"}, (int, float)  # of truth values numpy has sums of its own
    known: dict[tuple[str, str], Any] = {}

    def joined(a: Any, b: Any) -> Any:
        """The shape of two operands together, of which None is a scalar; False where the interpreter has to say."""
        if a is None or b is None or a == b:
            return b if a is None else a
        if len(a) != len(b) or any(x != y and x != 1 and y != 1 for x, y in zip(a, b, strict=True)):
            return False
        return [y if x == 1 else x for x, y in zip(a, b, strict=True)]

    def shape_of(kind: Any) -> Any:
        return kind.shape.values if type(kind) is block_type else None

    def together(self: Any, left: Any, right: Any) -> Any:
        """For operands of these types: what each is converted to, and the types of a result and of a comparison."""
        a, b, shape = left.scalar, right.scalar, joined(shape_of(left), shape_of(right))
        if shape is False or not (a.name == b.name == "int1" or (a.name in plain and b.name in plain)):
            return None
        both = a if a.name == b.name else self.computation_type_impl(a, False, b, False, False)
        to = [None if x.name == both.name else np_dtype(both) for x in (a, b)]
        kinds = [x if shape is None else block_type(x, shape) for x in (both, core.int1)]
        return *to, both, *kinds, shape

    def lies_alike(own: Any, other: Any, shape: Any) -> Any:
        """In memory, a result lies as its operands do, and sums depend on that: a scalar would have been a whole block."""
        return other if shape is None or own.flags.c_contiguous else np.full(shape, other, other.dtype)

    def operands(self: Any, lhs: Any, rhs: Any) -> Any:
        """Two arrays for numpy, and what their types are together; None where the interpreter has to say."""
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if left and right:
            key = (lhs.type.name, rhs.type.name)
            if key not in known:
                known[key] = together(self, lhs.type, rhs.type)
            found = known[key]
            if found is None:
                return None
            a, b = lhs.handle.data, rhs.handle.data
            if found[0] is not None:
                a = a.astype(found[0])
            if found[1] is not None:
                b = b.astype(found[1])
            if a.shape != b.shape:
                if type(lhs.type) is not block_type:
                    a = lies_alike(b, a, found[5])
                elif type(rhs.type) is not block_type:
                    b = lies_alike(a, b, found[5])
        elif left or right:
            one, number = (lhs, rhs) if left else (rhs, lhs)
            dtype = one.dtype
            if type(number) not in numbers or dtype.name not in plain:
                return None
            if self.computation_type_impl(dtype, False, self.to_tensor_type(number), True, False).name != dtype.name:
                return None
            key = (one.type.name, one.type.name)
            if key not in known:
                known[key] = together(self, one.type, one.type)
            found, own = known[key], one.handle.data
            other = lies_alike(own, self._cast_to_computation_type(number, dtype).handle.data, found[5])
            a, b = (own, other) if left else (other, own)
        else:
            return None
        return (a, b, found) if a.dtype == b.dtype else None

    def quickly(operate: Any, original: Any, compares: bool) -> Any:
        def run(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
            found = operands(self, lhs, rhs)
            if found is None or found[2][2].name not in plain:
                return original(self, lhs, rhs, *options, **named)
            a, b, (_, _, dtype, kind, truth, _) = found
            return tensor(handle(operate(a, b), dtype), truth if compares else kind)

        return run

    def of_bits(operate: Any, original: Any) -> Any:
        def run(self: Any, lhs: Any, rhs: Any) -> Any:
            if type(lhs) is tensor and type(rhs) is tensor and lhs.dtype.name == "int1" == rhs.dtype.name:
                found = operands(self, lhs, rhs)
                if found is not None and found[0].dtype == bool:
                    return tensor(handle(operate(found[0], found[1]), lhs.handle.dtype.scalar), found[2][3])
            return original(self, lhs, rhs)

        return run

    def moved(original: Any) -> Any:
        """Offsets are added to addresses, of which only loads and stores see how they lie."""

        def run(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
            if type(lhs) is tensor and type(rhs) is tensor and type(lhs.dtype) is pointer_type and rhs.dtype.name in plain:
                shape, own = joined(shape_of(lhs.type), shape_of(rhs.type)), lhs.handle
                if shape is not False and rhs.dtype.is_int():
                    size = max(1, own.get_element_ty().primitive_bitwidth // 8)
                    at = own.data + size * rhs.handle.data.astype(np.uint64)
                    kind = lhs.type if shape == shape_of(lhs.type) else block_type(lhs.dtype, shape)
                    return tensor(handle(at, own.dtype), kind)
            return original(self, lhs, rhs, *options, **named)

        return run

    def chosen(original: Any) -> Any:
        def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
            if type(condition) is tensor and type(x) is tensor and condition.dtype.name == "int1" and x.dtype.name in plain:
                found = operands(self, x, y)
                # Where one of them lies as it should, so does the result.
                if found is not None and shape_of(condition.type) == found[2][5] and x.handle.data.flags.c_contiguous:
                    a, b, (_, _, dtype, kind, _, shape) = found
                    if shape == shape_of(x.type) and condition.handle.data.dtype == bool:
                        return tensor(handle(np.where(condition.handle.data, a, b), dtype), kind)
            return original(self, condition, x, y)

        return where

    def expanded(original: Any) -> Any:
        kinds: dict[tuple[str, int], Any] = {}

        def expand_dims(self: Any, x: Any, axis: int) -> Any:
            key = (x.type.name, axis)
            kind = kinds.get(key)
            # Pointers of the same name may be of different places.
            if kind is None or type(x.dtype) is pointer_type:
                made = original(self, x, axis)
                if type(x.type) is block_type:
                    kinds[key] = made.type
                return made
            data = x.handle.data
            return tensor(handle(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), x.handle.dtype.scalar), kind)

        return expand_dims

    for names, compares in ((ARITHMETIC, False), (COMPARISONS, True)):
        for name, of_numpy in names.items():
            setattr(semantic, name, quickly(getattr(np, of_numpy), getattr(semantic, name), compares))
    for name, of_numpy in BITWISE.items():
        setattr(semantic, name, of_bits(getattr(np, of_numpy), getattr(semantic, name)))
    semantic.add, semantic.where = moved(semantic.add), chosen(semantic.where)
    semantic.expand_dims = expanded(semantic.expand_dims)
