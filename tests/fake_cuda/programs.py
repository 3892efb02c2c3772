"""The programs that use the fake CUDA device, imported once for all of them; see
`counting.counted`.
"""

from tests.fake_cuda import device  # noqa: F401 - first, before torch looks for CUDA

# isort: split

from tests.fake_cuda import checks, generation, phases  # noqa: F401
from tests.models.wan import counted_block as wan_counted_block  # noqa: F401
from tests.planning import counted_block  # noqa: F401
