"""The language of the services: every message and stub by its own name, e.g. `from protos import Trajectory`."""

from protos.generated.conductor_pb2 import *  # noqa: F403
from protos.generated.conductor_pb2_grpc import *  # noqa: F403
from protos.generated.control_pb2 import *  # noqa: F403
from protos.generated.control_pb2_grpc import *  # noqa: F403
from protos.generated.reference_pb2 import *  # noqa: F403
from protos.generated.reference_pb2_grpc import *  # noqa: F403
from protos.generated.reward_pb2 import *  # noqa: F403
from protos.generated.reward_pb2_grpc import *  # noqa: F403
from protos.generated.rollout_pb2 import *  # noqa: F403
from protos.generated.rollout_pb2_grpc import *  # noqa: F403
from protos.generated.telemetry_pb2 import *  # noqa: F403
from protos.generated.trainer_pb2 import *  # noqa: F403
from protos.generated.trainer_pb2_grpc import *  # noqa: F403
from protos.generated.trajectory_pb2 import *  # noqa: F403
from protos.generated.weights_pb2 import *  # noqa: F403

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
