"""What the tests share: images, a namespace with storage, kubectl, the chart, and what to show on a failure."""
