"""The types of arguments."""

from ._progress import Progress as Progress
from ._run.damage_fallback import OnDamage as OnDamage
from ._run.failed_saves import OnError as OnError
from ._steps.retention import Keep as Keep, Mode as Mode
from ._steps.save_times import When as When
from ._tree.leaves.casting import Casting as Casting
from ._tree.plans.read_plan import (
    Mismatched as Mismatched,
    Missing as Missing,
    Unexpected as Unexpected,
)
from ._tree.plans.write_plan import Compression as Compression
from ._tree.transform.transform_argument import Transform as Transform
from ._types import Format as Format, Layout as Layout, Target as Target
from .data._order import Order as Order
