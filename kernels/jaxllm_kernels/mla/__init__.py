"""Latent attention, and the table of its implementations."""

from jaxllm_kernels.mla.api import register_latent_backend
from jaxllm_kernels.mla.gpu import MosaicGpuLatentBackend
from jaxllm_kernels.mla.native import NativeLatentBackend
from jaxllm_kernels.mla.reference import ReferenceLatentBackend
from jaxllm_kernels.mla.tpu import TpuLatentBackend
from jaxllm_kernels.mla.xla import XlaLatentBackend

register_latent_backend(NativeLatentBackend())
register_latent_backend(ReferenceLatentBackend())
register_latent_backend(TpuLatentBackend())
register_latent_backend(XlaLatentBackend())
register_latent_backend(MosaicGpuLatentBackend())
