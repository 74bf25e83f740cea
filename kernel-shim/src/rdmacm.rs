//! Place of `/dev/infiniband/rdma_cm`, which comes with connection management.
//!
//! Until then the node does not exist, and librdmacm says that there is no connection manager.
