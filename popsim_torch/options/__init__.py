"""``Options``: the settings of a model and of its runs."""

from popsim_torch.errors import ConfigFileError
from popsim_torch.options.distributed import _DistributedOptions as _DistributedOptions
from popsim_torch.options.groups import _JitOptions as _JitOptions
from popsim_torch.options.groups import _PrecisionOptions as _PrecisionOptions
from popsim_torch.options.groups import _TrainingOptions as _TrainingOptions
from popsim_torch.options.groups import check_accumulation_dtype as check_accumulation_dtype
from popsim_torch.options.groups import own_dtype as own_dtype
from popsim_torch.options.locations import TensorLocationSettings
from popsim_torch.options.locations import _TensorLocationOptions as _TensorLocationOptions
from popsim_torch.options.options import Options
from popsim_torch.options.popart import _PopartOptions as _PopartOptions

__all__ = ["ConfigFileError", "Options", "TensorLocationSettings"]
