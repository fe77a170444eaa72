"""One run of a study, which `dc-trl study` starts: `dc-trl train`, and the policy that is trained is measured too."""

import sys

from ..study.trained import TrainedPolicyCallback
from ..training.command import train


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], TrainedPolicyCallback))
