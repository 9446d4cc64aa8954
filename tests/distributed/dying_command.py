"""`perilune train ...` as torchrun starts it; the second rank of the first attempt is killed in its fourth step."""

import os
import signal
import sys

from perilune.cli import main
from perilune.train import trainer

if __name__ == "__main__":
    real, steps = trainer.forward_backward, []

    def forward_backward(*arguments, **options):
        steps.append(0)
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(steps) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    trainer.forward_backward = forward_backward
    main(sys.argv[1:])
