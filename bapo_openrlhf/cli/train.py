"""`bapo-openrlhf train`: train on OpenRLHF's stack, with or without batch adaptation."""

from collections.abc import Sequence

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.training.driver.signals import caught


def main(argv: Sequence[str], prog: str = "bapo-openrlhf train") -> int:
    """Parse, check, train. A signal ends this with what it has to say."""
    with caught() as signals:
        args = arguments.parse(argv, prog)

        from bapo_openrlhf import machine
        from bapo_openrlhf.launch.resume import own_folders

        with own_folders(args), machine.processes():  # before all that takes time
            from bapo_openrlhf.launch.preflight import check_hub_models, check_inputs, print_warnings
            from bapo_openrlhf.launch.start import launch

            checked = check_inputs(args)
            check_hub_models(args)
            print_warnings(checked)
            launch(args, checked, signals, [*prog.split(), *argv])
    return 0
