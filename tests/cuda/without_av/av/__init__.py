"""Names of PyAV that hyvideo imports, for checks that write no video on a machine without PyAV."""


class VideoFrame: ...


class VideoStream: ...


class FFmpegError(Exception): ...


def open(*_arguments, **_options):
    raise ModuleNotFoundError(
        "this check needs the package av, which is not installed: pip install av"
    )
