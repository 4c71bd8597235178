"""What is read of a module in each format, against what its writer says."""

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jaxllm_kernels.coded import CodedWeight, CodeForm, NibbleOrder, values
from jaxllm_kernels.dense.xla import XlaCodedMatmul
from safetensors.numpy import save_file

from jaxllm.errors import CheckpointError, UnsupportedModelError
from jaxllm.layers.linear import Linear
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.quantization.held import E4m3OfPowers, Packed
from jaxllm.quantization.linear import CodedLinear
from jaxllm.quantization.products import Products
from jaxllm.quantization.read import read_scheme
from jaxllm.quantization.store import with_codes
from jaxllm.quantization.unpacked import Nibbles
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.loader import parameters_of, sources_of
from tests.quantization.formats import FORMATS, gptq

OUTPUTS, INPUTS = 72, 192


class Ordered(XlaCodedMatmul):
    """Holds codes of 4 bits in another order."""

    def held(self, form, num_outputs, num_inputs):
        assert num_inputs % 32 == 0
        codes = {"group": form.group, "has_offsets": form.has_offsets}
        return CodeForm(codes=form.codes, order=NibbleOrder(per_word=4, stride=8), **codes)


def write(path, name, tensors):
    save_file({f"{name}.{leaf}": np.atleast_1d(its) for leaf, its in tensors.items()},
              path / "model.safetensors")  # fmt: skip


def coded_linear(config, *, num_shards=1, axes=("mlp", "hidden"), op=None):
    scheme = read_scheme(config, None)
    storage = scheme.storage_of([("layer.mlp.down_proj",)])
    linear = nnx.eval_shape(lambda: Linear(INPUTS, OUTPUTS, bias=False, axes=axes, dtype="float32"))
    products = Products(linear=(op or XlaCodedMatmul(num_shards),))
    return CodedLinear(linear, storage, "layer", products=products, num_shards=num_shards), scheme


def read(path, module, scheme, cuts=((slice(0, OUTPUTS), 1),)):
    """The parameters of boxes that share rows and cut inputs in so many parts."""
    parameters = parameters_of(module)
    names = with_codes(CheckpointMap(), scheme)
    of = sources_of({f"layer.mlp.down_proj.{name}": p for name, p in parameters.items()}, names)
    with Checkpoint(path) as checkpoint:
        for rows, parts in cuts:
            for part in range(parts):
                arrays = {}
                for name, source in of.items():
                    is_shared = source.shape[1] == 1
                    width = 1 if is_shared else source.shape[1] // parts
                    first = 0 if is_shared else part * width
                    columns = slice(first, first + width)
                    dtype = parameters[name.rpartition(".")[2]].dtype
                    array = np.empty((rows.stop - rows.start, columns.stop - columns.start), dtype)
                    source.copy(checkpoint, (rows, columns), array)
                    arrays[name.rpartition(".")[2]] = array
                yield (
                    rows,
                    part,
                    CodedWeight(
                        codes=arrays["weight"],
                        scales=arrays["weight_scale"],
                        offsets=arrays.get("weight_offset"),
                        form=module.form,
                    ),
                )


def check(path, name, cuts, **options):
    tensors, expected = FORMATS[name].write(np.random.default_rng(1), OUTPUTS, INPUTS)
    write(path, "layer.mlp.down_proj", tensors)
    module, scheme = coded_linear(FORMATS[name].config, **options)
    largest = abs(expected).max()
    for rows, part, weight in read(path, module, scheme, cuts):
        found = np.asarray(values(weight), np.float64)
        width = found.shape[1]
        np.testing.assert_allclose(
            found, expected[rows, part * width : (part + 1) * width], atol=3e-7 * largest, rtol=0
        )
    return module


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_writer_also_in_parts(name, tmp_path):
    cuts = [(slice(0, OUTPUTS), 1), (slice(24, 60), 1), (slice(7, 8), 1)]
    check(tmp_path, name, cuts)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_shards", [2, 4])
def test_inputs_are_cut_over_devices_in_smaller_groups_if_need_be(name, num_shards, tmp_path):
    axes = ("hidden", "mlp")
    module = check(
        tmp_path, name, [(slice(0, OUTPUTS), num_shards)], num_shards=num_shards, axes=axes
    )
    group = module.form.group
    assert group is None or INPUTS // num_shards % group == 0


@pytest.mark.parametrize("name", [name for name in FORMATS if "4" in name or name == "awq"])
def test_codes_are_packed_in_the_order_that_products_want(name, tmp_path):
    module = check(tmp_path, name, [(slice(0, OUTPUTS), 1), (slice(3, 50), 1)], op=Ordered())
    assert module.form.order == NibbleOrder(per_word=4, stride=8)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_powers_of_two_are_held_by_output_as_float8(num_shards, tmp_path):
    op = XlaCodedMatmul(num_shards, mx_by_output=True)
    cuts = [(slice(0, OUTPUTS), num_shards), (slice(5, 20), num_shards)]
    module = check(tmp_path, "mxfp4", cuts, op=op, num_shards=num_shards, axes=("hidden", "mlp"))
    assert module.form == CodeForm(codes="float8_e4m3fn")
    assert module.weight.dtype == ml_dtypes.float8_e4m3fn


class Held:
    """A source of an array that is there."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def rows(self):
        return iter(())

    def copy(self, tensors, box, target):
        target[...] = self.array[box]


@pytest.mark.parametrize(("spread", "is_exact"), [(14, True), (15, False)])
def test_powers_that_float8_does_not_span_are_refused(spread, is_exact):
    numbers = Held(np.tile(np.arange(16, dtype=np.uint8), (2, 6)))
    powers = np.exp2(np.array([[0, -spread, -3], [4, 4, 4]], np.float32))
    codes, scales = (
        E4m3OfPowers(numbers, Held(powers), "experts", gives) for gives in ("codes", "scales")
    )
    target = np.empty((2, 96), ml_dtypes.float8_e4m3fn)
    box = (slice(0, 2), slice(0, 96))
    if not is_exact:
        with pytest.raises(UnsupportedModelError, match="experts differ by more than a factor of"):
            codes.copy(None, box, target)
        return
    codes.copy(None, box, target)
    factors = np.empty((2, 1), np.float32)
    scales.copy(None, (slice(0, 2), slice(0, 1)), factors)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = np.concatenate([table, -table])[numbers.array]
    np.testing.assert_array_equal(
        target.astype(np.float64) * factors, signed * np.repeat(powers, 32, axis=1)
    )


def test_bytes_of_a_checkpoint_are_not_packed_anew():
    held = Held(np.arange(64, dtype=np.uint8).reshape(2, 32))
    source = Packed(Nibbles(held), NibbleOrder())
    target = np.empty((2, 16), np.uint8)
    source.copy(None, (slice(0, 2), slice(8, 24)), target)
    np.testing.assert_array_equal(target, held.array[:, 8:24])


def spoilt(path, leaf, change):
    made = gptq(4, 32, symmetric=True)
    tensors, _ = made.write(np.random.default_rng(1), OUTPUTS, INPUTS)
    change(tensors[leaf])
    write(path, "layer.mlp.down_proj", tensors)
    module, scheme = coded_linear(made.config)
    list(read(path, module, scheme))


def test_an_order_of_activations_is_refused_by_the_name_of_its_tensor(tmp_path):
    def exchange(groups):
        groups[[0, 40]] = groups[[40, 0]]

    with pytest.raises(UnsupportedModelError, match="down_proj.g_idx: inputs are not in the order"):
        spoilt(tmp_path, "g_idx", exchange)


def test_zeros_of_symmetric_weights_are_verified(tmp_path):
    def change(zeros):
        zeros[0, 0] ^= 1

    with pytest.raises(CheckpointError, match="down_proj.qzeros has zeros other than 8"):
        spoilt(tmp_path, "qzeros", change)


def test_scales_of_nan_are_refused(tmp_path):
    tensors, _ = FORMATS["mxfp4"].write(np.random.default_rng(1), OUTPUTS, INPUTS)
    tensors["weight_scale"][5, 1] = 255
    write(tmp_path, "layer.mlp.down_proj", tensors)
    module, scheme = coded_linear(FORMATS["mxfp4"].config)
    with pytest.raises(CheckpointError, match="weight_scale has scales of NaN"):
        list(read(tmp_path, module, scheme))


def test_the_formats_are_those_that_compressed_tensors_reads(tmp_path):
    pytest.importorskip("compressed_tensors", reason="the oracle of its formats is not here")
    import torch
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def as_torch(array):
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == ml_dtypes.float8_e4m3fn:
            return torch.from_numpy(array.view(np.int8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(np.atleast_1d(array))

    for name, compressor in (
        ("packed-4-groups", PackedQuantizationCompressor),
        ("packed-4-groups-zeros", PackedQuantizationCompressor),
        ("packed-4-channels-zeros", PackedQuantizationCompressor),
        ("packed-8-groups-zeros", PackedQuantizationCompressor),
        ("nvfp4", NVFP4PackedCompressor),
    ):
        tensors, expected = FORMATS[name].write(np.random.default_rng(1), OUTPUTS, INPUTS)
        weights = FORMATS[name].config["config_groups"]["group_0"]["weights"]
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        state = {
            leaf: as_torch(its) for leaf, its in tensors.items() if leaf != "input_global_scale"
        }
        found = compressor.decompress(state, scheme)["weight"].float().numpy()
        # It rounds to bfloat16.
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-6, err_msg=name)
