/* The public verbs API the provider is compiled against. */
#include <infiniband/verbs.h>
