"""Ragged paged attention, and the registration of its implementations."""

from jaxllm_kernels.ragged_paged_attention.api import register_backend
from jaxllm_kernels.ragged_paged_attention.gpu import MosaicGpuBackend
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend
from jaxllm_kernels.ragged_paged_attention.reference import ReferenceBackend
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend
from jaxllm_kernels.ragged_paged_attention.xla import XlaBackend

register_backend(ReferenceBackend())
register_backend(TpuBackend())
register_backend(XlaBackend())
register_backend(NativeBackend())
register_backend(MosaicGpuBackend())
