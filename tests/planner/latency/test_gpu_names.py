"""Which data sheet is a product's."""

import pytest

from rlhfless_operator.planner.latency.gpu_names import gpu_of


@pytest.mark.parametrize(
    ("product", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA-L40S", "L40S"),
        ("h100", "H100"),
        # Others of the name
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
        # Parts of one
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", None),
        ("NVIDIA-H100-80GB-HBM3-SHARED", None),
    ],
)
def test_a_product_is_the_gpu_whose_data_sheet_fits_it(product: str, gpu: str | None) -> None:
    assert gpu_of(product) == gpu
