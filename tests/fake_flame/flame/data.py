"""What flame has here reads text. Packed tokens must have taken its place."""


def build_dataset(**settings):
    raise NotImplementedError(settings)


def build_dataloader(**settings):
    raise NotImplementedError(settings)
