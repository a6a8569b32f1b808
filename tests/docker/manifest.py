"""JSON schemas of the Kubernetes objects in docker/kubernetes.yml and docker/kuberay.yml.

They contain only the fields in use, so a misspelt or misplaced field is an error.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}
FLAG: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: Schema = {"type": "array", "items": TEXT}
QUANTITY: Schema = {"type": "string", "pattern": r"^\d+(m|[KMGT]i)?$"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}  # Kubernetes rejects numbers and booleans as values


def fields(optional: Schema | None = None, /, **required: Schema) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def items(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


def named(*choices: str) -> Schema:
    return {"enum": list(choices)}


METADATA = fields({"labels": LABELS, "annotations": LABELS}, name=TEXT)
PROBE = fields(
    {"periodSeconds": COUNT, "timeoutSeconds": COUNT, "failureThreshold": COUNT, "initialDelaySeconds": COUNT},
    httpGet=fields(path={"type": "string", "pattern": "^/"}, port=TEXT),
)
IMAGE: Schema = {"type": "string", "pattern": r"^[a-z0-9./-]+:\d+\.\d+\.\d+$"}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}
CONFINED = fields(
    allowPrivilegeEscalation={"const": False},
    capabilities=fields(drop={"const": ["ALL"]}),
    readOnlyRootFilesystem={"const": True},
)
MOUNTS = items(fields({"readOnly": FLAG}, name=TEXT, mountPath={"type": "string", "pattern": "^/"}))
INIT_CONTAINER = fields(
    name=TEXT, image=IMAGE, command=TEXTS, resources=fields(limits=QUANTITIES), securityContext=CONFINED, volumeMounts=MOUNTS
)
CONTAINER = fields(
    name=TEXT,
    image=IMAGE,
    args=TEXTS,
    ports=items(fields(name={"type": "string", "pattern": "^[a-z-]{1,15}$"}, containerPort=PORT)),
    env=items(fields({"value": TEXT, "valueFrom": fields(resourceFieldRef=fields(resource=TEXT))}, name=TEXT)),
    startupProbe=PROBE,
    livenessProbe=PROBE,
    readinessProbe=PROBE,
    resources=fields(requests=QUANTITIES, limits=QUANTITIES),
    securityContext=CONFINED,
    volumeMounts=MOUNTS,
)
POD = fields(
    automountServiceAccountToken=FLAG,
    enableServiceLinks=FLAG,
    terminationGracePeriodSeconds=COUNT,
    securityContext=fields(
        runAsNonRoot=FLAG,
        runAsUser=COUNT,
        runAsGroup=COUNT,
        fsGroup=COUNT,
        seccompProfile=fields(type=named("RuntimeDefault", "Localhost")),
    ),
    initContainers=items(INIT_CONTAINER),
    containers=items(CONTAINER),
    volumes=items(
        fields(
            {"secret": fields(secretName=TEXT, defaultMode={"type": "integer"}), "emptyDir": fields({"sizeLimit": QUANTITY})},
            name=TEXT,
        )
    ),
)
DEPLOYMENT = fields(
    apiVersion=named("apps/v1"),
    kind=named("Deployment"),
    metadata=METADATA,
    spec=fields(
        replicas=COUNT,
        selector=fields(matchLabels=LABELS),
        template=fields(metadata=fields({"annotations": LABELS}, labels=LABELS), spec=POD),
    ),
)
SERVICE = fields(
    apiVersion=named("v1"),
    kind=named("Service"),
    metadata=METADATA,
    spec=fields(
        selector=LABELS,
        ports=items(fields(name=TEXT, port=PORT, targetPort=TEXT)),
        sessionAffinity=named("ClientIP", "None"),
        sessionAffinityConfig=fields(clientIP=fields(timeoutSeconds={"type": "integer", "minimum": 1, "maximum": 86400})),
    ),
)
RAY_VOLUME: Schema = {
    "secret": fields(secretName=TEXT, defaultMode={"type": "integer"}),
    "configMap": fields(name=TEXT),
    "emptyDir": fields(sizeLimit=QUANTITY),
}
RAY_POD = fields(
    {"automountServiceAccountToken": FLAG},
    enableServiceLinks=FLAG,
    securityContext=fields(
        runAsNonRoot=FLAG,
        runAsUser=COUNT,
        runAsGroup=COUNT,
        fsGroup=COUNT,
        seccompProfile=fields(type=named("RuntimeDefault", "Localhost")),
    ),
    initContainers=items(INIT_CONTAINER),
    containers=items(
        fields(
            name=TEXT,
            image=IMAGE,
            env=items(fields(name=TEXT, value=TEXT)),
            resources=fields(requests=QUANTITIES, limits=QUANTITIES),
            securityContext=CONFINED,
            volumeMounts=MOUNTS,
        )
    ),
    volumes=items(fields(RAY_VOLUME, name=TEXT)),
)
RAY_GROUP = {"rayStartParams": LABELS, "template": fields(spec=RAY_POD)}  # KubeRay takes the parameters as text
RAY_SERVICE = fields(
    apiVersion=named("ray.io/v1"),
    kind=named("RayService"),
    metadata=METADATA,
    spec=fields(
        serveConfigV2=TEXT,
        rayClusterConfig=fields(
            rayVersion=TEXT,
            authOptions=fields(mode=named("token", "disabled")),
            enableInTreeAutoscaling=FLAG,
            headGroupSpec=fields(**RAY_GROUP),
            workerGroupSpecs=items(fields(groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, **RAY_GROUP)),
        ),
    ),
)
SELECTOR = fields(
    {"matchLabels": LABELS, "matchExpressions": items(fields({"values": TEXTS}, key=TEXT, operator=named("Exists", "In")))}
)
NETWORK_POLICY = fields(
    apiVersion=named("networking.k8s.io/v1"),
    kind=named("NetworkPolicy"),
    metadata=METADATA,
    spec=fields(
        podSelector=SELECTOR,
        policyTypes=items(named("Ingress", "Egress")),
        ingress=items(
            fields(
                {
                    "from": items(fields({"podSelector": SELECTOR, "namespaceSelector": SELECTOR})),
                    "ports": items(fields(port=PORT)),
                }
            )
        ),
    ),
)
SCHEMAS = {"Deployment": DEPLOYMENT, "Service": SERVICE, "NetworkPolicy": NETWORK_POLICY}
