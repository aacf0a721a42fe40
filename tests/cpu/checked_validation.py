"""A rank that trains and validates, and checks FSDP's state after each validation.

Run it as titan_lifecycle.run.worker: ``torchrun ... checked_validation.py JOB.toml [overrides]``.
"""

import sys

from titan_lifecycle import cpu_backend

cpu_backend.activate()

from torch.distributed.fsdp import FSDPModule  # noqa: E402  # after the device is settled
from torchtitan.components.validate import Validator  # noqa: E402

from tests import scenarios as s  # noqa: E402
from titan_lifecycle.run.worker import main  # noqa: E402

validate = Validator.validate


def checked_validate(self, model_parts, step):
    validate(self, model_parts, step)
    for part in model_parts:
        assert s.leftovers(part) == [], s.leftovers(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    kept_by_policy = group.post_forward_mesh_info is None
                    assert group.is_sharded or kept_by_policy, group._module_fqn


Validator.validate = checked_validate

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
